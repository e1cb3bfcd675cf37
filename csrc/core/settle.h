// What the reduced sums of a round make of coefficients and factored moments; one definition for
// every processor.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/exact_sum.h"
#include "core/layout.h"
#include "core/update/rule.h"

namespace lowbit {

/// Takes what the sums of a round say into coef. `totals`: of all rounds of the job; `keep` also
/// writes the tensor's numbers; digit: see exact_value.
template <class U>
LB_HD void settle_round(int round, const int64_t* totals, int64_t numel, float* numbers, bool keep,
                        int64_t* digit, typename U::Coef& coef) {
  if constexpr (rounds_of<U>() > 0) {
    static_assert(kMaxTotals == 2);
    const int64_t* words = totals + round * kMaxTotals * ExactSum::kWords;
    double sum[kMaxTotals] = {};  // by hand: a loop would make it an array in a GPU's memory
    if (U::totals(round) > 0) sum[0] = exact_value(words, digit);
    if (U::totals(round) > 1) sum[1] = exact_value(words + ExactSum::kWords, digit);
    float number[kMaxNumbers] = {};
    for (int k = 0; k < numbers_of<U>(); ++k) number[k] = numbers[k];
    U::settle(round, sum, static_cast<double>(numel), number, coef);
    for (int k = 0; keep && k < numbers_of<U>(); ++k) numbers[k] = canonical(number[k]);
  }
}

/// By how much a factored moment moves in a step, and the least that the mean of its rows may be.
struct FactorMove {
  float weight, least;
};
template <class U>
LB_HD FactorMove factor_move(int k, const typename U::Coef& coef) {
  if constexpr (factors_of<U>() > 0) {
    return {U::factor_weight(k, coef), U::least_mean(k, coef)};
  } else {
    (void)k, (void)coef;
    return {0.0f, 0.0f};
  }
}

/// A mean that moves by `weight` towards another, in float32.
LB_HD float moved(float mean, double to, float weight) {
  return canonical(mean + weight * (static_cast<float>(to) - mean));
}

/// The mean of the rows, from that of the old rows and that of all that was added.
LB_HD double mean_of_rows(double old, double added, const FactorMove& move) {
  const double mean = old + static_cast<double>(move.weight) * (added - old);
  return mean < static_cast<double>(move.least) ? static_cast<double>(move.least) : mean;
}

/// A row divided by the rows' mean.
LB_HD float scaled_row(float row, double mean) {
  return mean == 0.0 ? 0.0f : static_cast<float>(static_cast<double>(row) / mean);
}

}  // namespace lowbit
