// Sums over the rows of a gradient whose rows lie on several ranks, L[k][j] = sum_i P[i][k]
// G[i][j]. Terms are in fixed point and added as int64, so the error does not depend on how ranks
// share the rows.
//
//   absmax_j = max_i |G[i][j]|  over all ranks (as bits: core/bits.h),   |P| <= 2^n
//   unit_j = 2^(ceil(log2 absmax_j) + n - 40),   a term is at most 2^40 units
//   sum[k][j] = sum_i round(P[i][k] G[i][j] / unit_j)      to nearest, ties to even
//   L[k][j] = float(sum[k][j] * unit_j)
//
// The product of two floats is exact in double, so a term is rounded once. 2^23 - 1 rows fit into
// int64. The error of a term is at most 2^-41 of the column's largest possible term. A column with
// an infinity or a NaN becomes NaN; its sums are 0.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/exact_sum.h"
#include "core/lowrank/projection.h"
#include "core/macros.h"

namespace lowbit {

constexpr int kFixedBits = 40;
constexpr int64_t kFixedRows = (int64_t{1} << 23) - 1;
/// The number of terms, in whole units, whose sum is still exact in double.
constexpr int kFixedExact = 1 << (53 - kFixedBits - 1);

struct FixedColumn {
  bool finite;
  int exponent;  // unit = 2^exponent

  LB_HD FixedColumn(uint32_t maximum, int projection_exponent)
      : finite(maximum < kInfinityBits), exponent(-kFixedBits) {
    if (finite && maximum != 0) {
      exponent = exponent_above(static_cast<double>(bits_float(maximum))) + projection_exponent -
                 kFixedBits;
    }
  }
  /// Adding this to a term and subtracting it again rounds the term to a multiple of the unit.
  LB_HD double rounder() const { return 1.5 * power_of_two(52 + exponent); }
  /// A sum of rounded terms as a number of units. The sum is below 2^53 units.
  LB_HD int64_t units(double sum) const {
    return finite ? static_cast<int64_t>(sum * power_of_two(-exponent)) : 0;
  }
  LB_HD float value(int64_t sum) const {
    return finite ? static_cast<float>(static_cast<double>(sum) * power_of_two(exponent))
                  : bits_float(kCanonicalNan);
  }
};

}  // namespace lowbit
