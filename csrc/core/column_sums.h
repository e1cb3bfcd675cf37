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
  static constexpr int kTogether = 4;  // rows in one call
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
    exact_carry_few(word);
  }
  sums.rows = 0;
}

/// Selects the windows by `rows` rows of n terms, and clears the sums.
LB_HD void begin_columns(const float* x, int stride, int rows, int n, ColumnSums& sums) {
  int32_t largest = 0;
  for (int r = 0; r < rows; ++r) {
    for (int i = 0; i < n; ++i) {
      const auto bits = static_cast<int32_t>(magnitude_bits(x[r * stride + i]));
      const bool finite = bits < static_cast<int32_t>(kInfinityBits);
      largest = finite && bits > largest ? bits : largest;
    }
  }
  for (int i = 0; i < n; ++i) sums.high[i] = sums.low[i] = 0.0;
  const int top = (largest >> 23) + ColumnSums::kRoom + 1;
  const int high = top - ColumnSums::kSpan;
  // 239 is the highest position for which three words remain.
  sums.absmin_high = high < 1 ? 1 : high > 239 ? 239 : high;
  const int low = sums.absmin_high - ColumnSums::kSpan;
  sums.absmin_low = low < 1 ? 1 : low;
}

/// Adds `rows` rows of n terms, `stride` apart, no more than ColumnSums::kTogether: the sums of a
/// column are in registers meanwhile. `words` are those of the columns, usually the same as before.
LB_HD void add_columns(const float* x, int stride, int rows, int n, ColumnSums& sums,
                       int64_t* words) {
  using V = SumVector;
  if (words != sums.words || n != sums.count ||  // flat shards begin and end inside rows
      sums.rows + rows > ColumnSums::kRows) {
    flush_columns(sums);
    sums.words = words, sums.count = n;
  }
  if (sums.rows == 0) begin_columns(x, stride, rows, n, sums);
  const int whole = n & ~(V::kLanes - 1);
  const int32_t above = ColumnSums::from(sums.absmin_high + ColumnSums::kSpan),
                upper = ColumnSums::from(sums.absmin_high),
                below = ColumnSums::from(sums.absmin_low);
  const V::Bits before_above = V::before(above), before_upper = V::before(upper),
                before_lower = V::before(below);
  V::Bits outside = V::all(0);
  for (int i = 0; i < whole; i += V::kLanes) {
    V::Sums high, low;
    V::load(sums.high + i, high), V::load(sums.low + i, low);
    for (int r = 0; r < rows; ++r) {
      const V::Bits bits = V::load(x + r * stride + i), magnitude = V::magnitude(bits);
      const V::Mask is_upper = V::greater(magnitude, before_upper),
                    taken = V::without(V::greater(magnitude, before_lower),
                                       V::greater(magnitude, before_above));
      V::add(high, bits, V::both(taken, is_upper));
      V::add(low, bits, V::without(taken, is_upper));
      outside = V::join_others(outside, taken, magnitude);
    }
    V::store(high, sums.high + i), V::store(low, sums.low + i);
  }
  const bool any = whole < n || V::largest(outside) != 0;
  for (int r = 0; any && r < rows; ++r) {
    for (int i = 0; i < n; ++i) {
      const float term = x[r * stride + i];
      const auto bits = static_cast<int32_t>(magnitude_bits(term));
      if (i >= whole || bits >= above || (bits < below && bits != 0))
        exact_add(term, words + i * ExactSum::kWords);
    }
  }
  sums.rows += rows;
  if (sums.rows == ColumnSums::kRows) flush_columns(sums);
}

}  // namespace lowbit
