// The optional members of an update rule, beyond Coef, prepare and update.
//
// A rule that needs sums over the tensor, or a factored second moment, is *measured* first:
//
//   kRounds               number of measuring rounds before the update; after each round the sums
//                         are reduced over the shards
//   grid_factor(round)    factored moment of the round's `grid` values, or -1
//   measure<round>(g, p, s, f, coef, grid, totals)
//                         one element: its contribution to the sums of its row and column (grid)
//                         and to the sums over the tensor (totals: two, or one in a round with a
//                         grid). s is a copy and may be updated
//   reads(round)          what measure<round> reads beside the gradient: a set of Reads, all of
//                         them without this member
//   factor_weight(k, coef), min_mean(k, coef)
//                         factored moment k: the share by which row and column means move toward
//                         the measured ones, and the lower bound of the rows' mean, by which
//                         rows are divided
//   finalize(round, totals, numel, numbers, coef)
//                         once per tensor and round: computes coefficients from the reduced sums,
//                         in double; numbers are part of the state
//   update(g, p, s, f, coef)
//                         f[2k], f[2k+1]: row factor (divided by the rows' mean) and column factor
//                         of moment k, whose product is the element's second moment
//
// Sums are exact (exact_sum.h), so they do not depend on the order of terms or on the sharding.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/macros.h"

namespace lowbit {

/// One state tensor of an update rule.
struct Slot {
  const char* name = "";   // the name in torch
  bool is_signed = false;  // false: never negative, so formats without negative codes suffice
  // A copy of weights, which takes their precision: presets do not quantize it.
  bool is_weight = false;
  // A mean over thousands of steps. One step changes it by less than codes can tell apart, so
  // presets keep it in kSlowMean (policy/presets.h).
  bool is_slow = false;
};

template <class U>
LB_HD constexpr int rounds_of() {
  if constexpr (requires { U::kRounds; }) {
    return U::kRounds;
  } else {
    return 0;
  }
}
enum Reads : int { kReadsParam = 1, kReadsState = 2, kReadsFactors = 4, kReadsAll = 7 };
template <class U>
LB_HD constexpr int reads_of(int round) {
  if constexpr (requires { U::reads(0); }) {
    return U::reads(round);
  } else {
    return kReadsAll;
  }
}
template <class U>
LB_HD constexpr int factors_of() {
  if constexpr (requires { U::kFactors; }) {
    return U::kFactors;
  } else {
    return 0;
  }
}
template <class U>
LB_HD constexpr int numbers_of() {
  if constexpr (requires { U::kNumbers; }) {
    return U::kNumbers;
  } else {
    return 0;
  }
}

/// The state values of one element.
template <class U>
using Values = float[U::kSlots > 0 ? U::kSlots : 1];

/// Updates one element of a rule with or without factored moments.
template <class U>
LB_HD void update_element(float g, float& p, Values<U>& s, const float* f,
                          const typename U::Coef& coef) {
  if constexpr (factors_of<U>() > 0) {
    U::update(g, p, s, f, coef);
  } else {
    (void)f;
    U::update(g, p, s, coef);
  }
}

}  // namespace lowbit
