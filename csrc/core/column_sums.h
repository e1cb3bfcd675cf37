// Exact sums (exact_sum.h) of many columns at once, a row after another.
//
// Terms whose exponents lie within 21 of each other have an exact sum in double, 256 of them in any
// order (24 + 20 + 8 = 52 bits). So every column has two such sums, over the upper and the lower 21
// of 42 exponents that are chosen by a first row, with room above it; the few terms outside go to
// the column's words one by one. Behind 256 rows the sums go there too.
#pragma once

#include "core/exact_sum.h"

namespace lowbit {

struct ColumnSums {
  static constexpr int kRows = 256, kSpan = 21;
  static constexpr int kRoom =
      6;                     // exponents between the first row's largest term and the window's end
  double *high, *low;        // room for as many columns as a row has
  int64_t* words = nullptr;  // of the columns
  int count = 0;             // of columns
  int rows = 0;              // that the sums are of
  int least_high = 0,
      least_low = 0;  // least exponents of both; 1 stands for the subnormal ones too

  /// What bits of a magnitude an exponent begins with.
  static constexpr int32_t from(int exponent) {
    if (exponent >= 255) return static_cast<int32_t>(kInfinityBits);
    return exponent > 1 ? exponent << 23 : 1;
  }
};

/// Moves the sums to the words.
LB_HD void flush_columns(ColumnSums& sums) {
  if (sums.rows == 0) return;
  for (int i = 0; i < sums.count; ++i) {
    int64_t* word = sums.words + i * ExactSum::kWords;
    exact_add_units(sums.high[i], sums.least_high - 1, word);
    exact_add_units(sums.low[i], sums.least_low - 1, word);
    exact_carry(word);
  }
  sums.rows = 0;
}

/// A row of n terms, whose columns have these words: those of the row before, as a rule.
LB_HD void add_columns(const float* x, int n, ColumnSums& sums, int64_t* words) {
  if (words != sums.words || n != sums.count) {  // flat shards begin and end inside of rows
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
    const int top = (largest >> 23) + ColumnSums::kRoom + 1;  // 239: three words from there
    const int high = top - ColumnSums::kSpan;
    sums.least_high = high < 1 ? 1 : high > 239 ? 239 : high;
    const int low = sums.least_high - ColumnSums::kSpan;
    sums.least_low = low < 1 ? 1 : low;
  }
  const int32_t above = ColumnSums::from(sums.least_high + ColumnSums::kSpan),
                upper = ColumnSums::from(sums.least_high), below = ColumnSums::from(sums.least_low);
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
