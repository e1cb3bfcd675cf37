// Exact sums (exact_sum.h) of many columns at once, row by row.
//
// The sum of 256 terms whose exponents lie within 21 of each other is exact in double, in any order
// (24 + 20 + 8 = 52 bits). Each column therefore has two such sums, over the upper and the lower 21
// of 42 exponents. The first row selects the 42 exponents and leaves room above itself. The few
// terms outside go to the column's words one by one. After 256 rows the sums are flushed to the
// words.
#pragma once

#include "core/exact_sum.h"

namespace lowbit {

struct ColumnSums {
  static constexpr int kRows = 256, kSpan = 21;
  // Exponents between the first row's largest term and the end of the window.
  static constexpr int kRoom = 6;
  double *high, *low;        // one for each column of a row
  int64_t* words = nullptr;  // of the current columns
  int count = 0;             // number of columns
  int rows = 0;              // rows added since the last flush
  // Lowest exponents of the two windows. 1 also covers subnormals.
  int absmin_high = 0, absmin_low = 0;

  /// The lowest magnitude bits with this exponent.
  static constexpr int32_t from(int exponent) {
    if (exponent >= 255) return static_cast<int32_t>(kInfinityBits);
    return exponent > 1 ? exponent << 23 : 1;
  }
};

/// Flushes the sums to the words.
LB_HD void flush_columns(ColumnSums& sums) {
  if (sums.rows == 0) return;
  for (int i = 0; i < sums.count; ++i) {
    int64_t* word = sums.words + i * ExactSum::kWords;
    exact_add_units(sums.high[i], sums.absmin_high - 1, word);
    exact_add_units(sums.low[i], sums.absmin_low - 1, word);
    exact_carry(word);
  }
  sums.rows = 0;
}

/// Adds a row of n terms. `words` are those of its columns, usually the same as for the previous
/// row.
LB_HD void add_columns(const float* x, int n, ColumnSums& sums, int64_t* words) {
  if (words != sums.words || n != sums.count) {  // flat shards begin and end inside rows
    flush_columns(sums);
    sums.words = words, sums.count = n;
  }
  constexpr int kLanes = kExactLanes;
  using Floats = float __attribute__((vector_size(4 * kLanes)));
  using Bits = int32_t __attribute__((vector_size(4 * kLanes)));
  using Doubles = double __attribute__((vector_size(8 * kLanes)));
  const int whole = n & ~(kLanes - 1);
  if (sums.rows == 0) {
    int32_t largest = 0;
    for (int i = 0; i < n; ++i) {
      const auto bits = static_cast<int32_t>(magnitude_bits(x[i]));
      const bool finite = bits < static_cast<int32_t>(kInfinityBits);
      largest = finite && bits > largest ? bits : largest;
      sums.high[i] = sums.low[i] = 0.0;
    }
    const int top = (largest >> 23) + ColumnSums::kRoom + 1;
    const int high = top - ColumnSums::kSpan;
    // 239 is the highest position for which three words remain.
    sums.absmin_high = high < 1 ? 1 : high > 239 ? 239 : high;
    const int low = sums.absmin_high - ColumnSums::kSpan;
    sums.absmin_low = low < 1 ? 1 : low;
  }
  const int32_t above = ColumnSums::from(sums.absmin_high + ColumnSums::kSpan),
                upper = ColumnSums::from(sums.absmin_high),
                below = ColumnSums::from(sums.absmin_low);
  Bits outside = {};
  for (int i = 0; i < whole; i += kLanes) {
    Bits bits;
    __builtin_memcpy(&bits, x + i, sizeof bits);
    const Bits magnitude = bits & 0x7fffffff;
    const Bits is_above = magnitude >= above, is_upper = magnitude >= upper,
               is_lower = magnitude >= below;
    Doubles high, low;
    __builtin_memcpy(&high, sums.high + i, sizeof high);
    __builtin_memcpy(&low, sums.low + i, sizeof low);
    high += __builtin_convertvector((Floats)(bits & (is_upper & ~is_above)), Doubles);
    low += __builtin_convertvector((Floats)(bits & (is_lower & ~is_upper)), Doubles);
    __builtin_memcpy(sums.high + i, &high, sizeof high);
    __builtin_memcpy(sums.low + i, &low, sizeof low);
    outside |= magnitude & (is_above | ~is_lower);
  }
  int32_t any = whole < n;
  for (int j = 0; j < kLanes; ++j) any |= outside[j];
  for (int i = 0; any != 0 && i < n; ++i) {
    const auto bits = static_cast<int32_t>(magnitude_bits(x[i]));
    if (i >= whole || bits >= above || bits < below) exact_add(x[i], words + i * ExactSum::kWords);
  }
  if (++sums.rows == ColumnSums::kRows) flush_columns(sums);
}

}  // namespace lowbit
