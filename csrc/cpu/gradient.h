// Passes over gradients outside a step: accumulation of micro-batches and exact sums for norms.
// Each takes a range of elements, in any order and on any thread.
#pragma once

#include <cstdint>

#include "core/exact_sum.h"
#include "core/job.h"
#include "cpu/kernels.h"

namespace lowbit::cpu {

/// Accumulates the tiles [begin, end), counted row by row.
void accumulate(const Accumulation& job, int64_t begin, int64_t end, const Kernels& kernel);

/// The words of a sum of magnitudes or squares: those of ExactSum, the last of which counts
/// infinities here, and a count of NaNs.
constexpr int kSumWords = ExactSum::kWords + 1;

/// Adds |g| (power 1) or g * g (power 2), each rounded to float32, of the elements [begin, end).
/// The words stay canonical if they were.
void add_powers(const void* grad, int grad_format, int power, int64_t begin, int64_t end,
                int64_t* words, const Kernels& kernel);

}  // namespace lowbit::cpu
