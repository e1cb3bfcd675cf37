// Making torchao's tensors: whole subclasses, and what a rank of a directory keeps of one.
#pragma once

#include <memory>

#include "container/box.h"
#include "dialect/torchao.h"

namespace lowbit::ckpt {

/// A subclass of codes and scales that are there, without a path.
Leaf torchao_leaf(const TorchaoKind& kind, const Dtype* dtype, const Shape& shape, bool is_signed,
                  int64_t block, std::shared_ptr<Source> codes, std::shared_ptr<Source> scales);
/// A subclass of new codes; `report` gets the errors.
Leaf torchao_coded(const TorchaoKind& kind, const Dtype* dtype, const Shape& shape, bool is_signed,
                   int64_t block, std::shared_ptr<Floats> values, StateReport* report);

/// How a rank keeps a box of a state: as new codes, or plain where the box is small or no multiple
/// of a block. `exact`: it must not round, so only the second will do.
std::function<Result<Leaf>(const Box&)> torchao_recut(const TorchaoKind& kind, const Leaf& leaf,
                                                      bool is_signed, int64_t block,
                                                      std::shared_ptr<Floats> values,
                                                      StateReport* report, bool exact);
/// The same of a state in a file; null where it has no codes of torchao's.
Result<std::function<Result<Leaf>(const Box&)>> torchao_recut(const Document& document,
                                                              const Leaf& leaf);

}  // namespace lowbit::ckpt
