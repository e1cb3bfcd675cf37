// How torchao stores a state: a tensor subclass or plain numbers, for each rank's box of the
// tensor.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dialect/model/model.h"
#include "dialect/torchao/kind.h"

namespace lowbit::ckpt {

/// A tensor inside a subclass.
struct TorchaoInner {
  const Dtype* dtype;
  Shape shape;
  std::shared_ptr<Source> source;
};

/// A box of a state: a subclass, or plain numbers.
struct TorchaoPiece {
  Shape offset, shape;
  const TorchaoKind* kind = nullptr;
  std::shared_ptr<Floats> values = {};
  std::string format = {};  // of lowbit, where the codes are its
  int64_t block = 0;
  std::shared_ptr<Source> codes = {}, scales = {};
  std::string note = {};
};

/// A subclass, as its container has read it.
struct TorchaoSubclass {
  std::string cls;
  std::vector<std::pair<std::string, TorchaoInner>> parts;
  const Value* attributes;
  std::string what;

  /// The inner tensor of that name; an error if it is missing or has another dtype.
  Result<const TorchaoInner*> needed(const char* name, const char* dtype) const;
  /// The values and codes, for the box at `offset`. `is_signed` is the default if the file does not
  /// say.
  Result<TorchaoPiece> piece(const Shape& offset, const Shape& shape, bool is_signed) const;
};

/// The values of a tensor that is stored in boxes.
std::shared_ptr<Floats> tiled(Shape shape, std::vector<TorchaoPiece> pieces);

}  // namespace lowbit::ckpt
