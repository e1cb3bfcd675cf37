// How the reduced sums of a round change coefficients and factored moments: one definition for
// every processor.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/exact_sum.h"
#include "core/layout.h"
#include "core/update/rule.h"

namespace lowbit {

/// Updates `coef` from the sums of a round. `totals` are those of all rounds of the job. With
/// `keep` the tensor's numbers are written too. `digit` is the scratch of exact_value.
template <class U>
LB_HD void finalize_round(int round, const int64_t* totals, int64_t numel, float* numbers,
                          bool keep, int64_t* digit, typename U::Coef& coef) {
  if constexpr (rounds_of<U>() > 0) {
    static_assert(kMaxTotals == 2);
    const int64_t* words = totals + round * kMaxTotals * ExactSum::kWords;
    // Unrolled by hand: a loop would put the array in a GPU's local memory.
    double sum[kMaxTotals] = {};
    if (U::totals(round) > 0) sum[0] = exact_value(words, digit);
    if (U::totals(round) > 1) sum[1] = exact_value(words + ExactSum::kWords, digit);
    float number[kMaxNumbers] = {};
    for (int k = 0; k < numbers_of<U>(); ++k) number[k] = numbers[k];
    U::finalize(round, sum, static_cast<double>(numel), number, coef);
    for (int k = 0; keep && k < numbers_of<U>(); ++k) numbers[k] = canonical(number[k]);
  }
}

/// The rate at which a factored moment moves in a step, and the lower bound of its rows' mean.
struct FactorMove {
  float weight, minimum;
};
template <class U>
LB_HD FactorMove factor_move(int k, const typename U::Coef& coef) {
  if constexpr (factors_of<U>() > 0) {
    return {U::factor_weight(k, coef), U::min_mean(k, coef)};
  } else {
    (void)k, (void)coef;
    return {0.0f, 0.0f};
  }
}

/// A mean, moved by `weight` toward another, in float32.
LB_HD float moved(float mean, double to, float weight) {
  return canonical(mean + weight * (static_cast<float>(to) - mean));
}

/// The new mean of the rows, from the mean of the old rows and the mean of the added values.
LB_HD double mean_of_rows(double old, double added, const FactorMove& move) {
  const double mean = old + static_cast<double>(move.weight) * (added - old);
  return mean < static_cast<double>(move.minimum) ? static_cast<double>(move.minimum) : mean;
}

/// A row divided by the mean of the rows.
LB_HD float scaled_row(float row, double mean) {
  return mean == 0.0 ? 0.0f : static_cast<float>(static_cast<double>(row) / mean);
}

}  // namespace lowbit
