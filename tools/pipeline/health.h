// How well a state's numbers sit in the way they are kept.
#pragma once

#include <cstdint>
#include <vector>

#include "dialect/model/model.h"

namespace lowbit::ckpt {

struct Health {
  /// Cells of the picture: a state's rows and columns in at most this many parts each.
  static constexpr int kCells = 48;
  uint64_t elements = 0, zero = 0, nan = 0, infinite = 0, negative = 0;
  double minimum = 0, limit = 0;    // magnitude: the smallest that is not zero, the largest
  double root_mean_square = 0;      // of what is finite
  bool coded = false;               // the rest is known of lowbit's formats and their likes only:
  uint64_t saturated = 0;           // codes of the lowest or highest value, but for those of zero
  std::vector<uint64_t> histogram;  // by code; of other state by power of two, 2^-64 to 2^63
  int used = 0;                     // codes that occur
  int cell_rows = 0, cell_cols = 0;
  std::vector<float> cells;  // largest magnitude in each cell, [cell_rows, cell_cols]
};

/// Reads all of a state that has `values`, once.
Result<Health> health_of(const State& state);

}  // namespace lowbit::ckpt
