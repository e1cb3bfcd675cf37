// Passes over gradients outside of a step: adding micro-batches up, and exact sums for norms. Each
// takes a range of elements, in any order and on any thread.
#pragma once

#include <cstdint>

#include "core/exact_sum.h"
#include "cpu/leaves.h"
#include "job.h"

namespace lowbit::cpu {

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
