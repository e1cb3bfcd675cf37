// Makes torchao's tensors: whole subclasses, and the part that each rank of a directory stores.
#pragma once

#include <memory>

#include "container/manifest/box.h"
#include "dialect/common/dialect.h"
#include "dialect/torchao/kind.h"

namespace lowbit::ckpt {

/// A subclass of given codes and scales, without a path.
Leaf torchao_leaf(const TorchaoKind& kind, const Dtype* dtype, const Shape& shape, bool is_signed,
                  int64_t block, std::shared_ptr<Source> codes, std::shared_ptr<Source> scales);
/// A subclass of quantized values; `report` receives the errors.
Leaf torchao_coded(const TorchaoKind& kind, const Dtype* dtype, const Shape& shape, bool is_signed,
                   int64_t block, std::shared_ptr<Floats> values, StateReport* report);

/// A function that cuts a box out of a state for one rank: requantized, or plain if the box is
/// small or no multiple of a block. `exact` forbids rounding, so only the second is allowed.
std::function<Result<Leaf>(const Box&)> torchao_recut(const TorchaoKind& kind, const Leaf& leaf,
                                                      bool is_signed, int64_t block,
                                                      std::shared_ptr<Floats> values,
                                                      StateReport* report, bool exact);
/// The same for a state in a file; null if it has no codes of torchao's.
Result<std::function<Result<Leaf>(const Box&)>> torchao_recut(const Document& document,
                                                              const Leaf& leaf);

}  // namespace lowbit::ckpt
