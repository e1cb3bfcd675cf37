// Codes to float32, by the kernels of the optimizer's step (csrc/cpu).
#pragma once

#include <memory>
#include <vector>

#include "dialect/model/model.h"

namespace lowbit::ckpt {

/// The values of codes with one scale for each block. Any block length is read, also those with
/// which no optimizer of lowbit steps.
std::shared_ptr<Floats> dequantized(const Codes& codes);

/// Where an element of a tensor has its number among those along one dimension.
struct Axis {
  uint64_t stride = 1, size = 1;
  /// `dim`: as in CrossTileScale.
  Axis(const Shape& shape, int dim);
  size_t at(uint64_t element) const { return element / stride % size; }
};

/// Absmax scales along one dimension of a tensor: one number for each index of `dim`.
struct CrossTileScale {
  static constexpr int kColumns = -1;  // all dimensions but the first, as one
  static constexpr int kWhole = -2;    // one number for the whole tensor
  int dim = 0;
  std::shared_ptr<Source> absmax;  // float32
};
/// The values of codes with cross-tile scales: the scale of an element is the least of those that
/// cover it. The scales are held in memory.
std::shared_ptr<Floats> dequantized_cross_tile(const Codes& codes, const Shape& shape,
                                               std::vector<CrossTileScale> scales);

}  // namespace lowbit::ckpt
