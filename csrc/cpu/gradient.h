// Passes over gradients outside of a step: adding micro-batches up, and exact sums for norms. Each
// takes a range of elements, in any order and on any thread.
#pragma once

#include <cstdint>

#include "core/exact_sum.h"
#include "core/random.h"
#include "cpu/leaves.h"

namespace lowbit::cpu {

/// A local part [rows, cols] of a gradient, contiguous, and the buffer that it is added to.
struct Accumulation {
  void* held;
  void* beside;  // what the buffer's format keeps beside it, or null
  const void* grad;
  int format, grad_format;  // indices into ParamFormats and GradFormats
  int64_t rows, cols;
  int64_t global_cols;  // of the whole gradient
  int64_t first;        // global flat index of the local element (0, 0)
  float scale;
  RandomKey random;

  int64_t tiles_per_row() const { return ceil_div(cols, kTile); }
  int64_t tiles() const { return rows * tiles_per_row(); }
};

/// Tiles [begin, end), counted row by row.
void accumulate(const Accumulation& job, int64_t begin, int64_t end, const Leaves& leaf);

/// Words of a sum of magnitudes or squares: ExactSum's, of which the last counts infinities here,
/// and a count of NaN.
constexpr int kSumWords = ExactSum::kWords + 1;

/// Adds |g| (power 1) or g * g (power 2), each rounded to float32, of the elements [begin, end);
/// canonical where `words` were.
void add_powers(const void* grad, int grad_format, int power, int64_t begin, int64_t end,
                int64_t* words, const Leaves& leaf);

}  // namespace lowbit::cpu
