// What an update rule may declare beyond Coef, prepare and update.
//
// A rule whose update needs sums over the tensor, or a factored second moment, is *measured* first:
//
//   kRounds               how many times values are summed before the update; between two rounds
//                         the sums are reduced over the shards
//   grid_factor(round)    which factored moment the round's `grid` values belong to, -1 for none
//   measure<round>(g, p, s, f, coef, grid, totals)
//                         one element: what it adds to the sum of its row and of its column (grid)
//                         and to sums over the tensor (totals: two, in a round with a grid one). s
//                         may be updated; it is a copy
//   factor_weight(k, coef), least_mean(k, coef)
//                         factored moment k: row and column means move by this share towards the
//                         measured ones; the mean of the rows, by which they are divided, is at
//                         least this
//   settle(round, totals, numel, numbers, coef)
//                         once per tensor and round: what the reduced sums make of the
//                         coefficients, in double; numbers are kept with the state
//   update(g, p, s, f, coef)
//                         f[2k], f[2k+1]: row factor (divided by the rows' mean) and column factor
//                         of moment k, whose product is the element's second moment
//
// Sums are exact (exact_sum.h), so they do not depend on the order or on who holds which part.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/macros.h"

namespace lowbit {

/// One state tensor of an update rule.
struct Slot {
  const char* name;  // torch's name for it
  bool is_signed;    // false: never negative, so a format without negative codes serves it
};

template <class U>
LB_HD constexpr int rounds_of() {
  if constexpr (requires { U::kRounds; }) {
    return U::kRounds;
  } else {
    return 0;
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

/// Room for the state values of one element.
template <class U>
using Values = float[U::kSlots > 0 ? U::kSlots : 1];

/// The update of one element, whether or not the rule has factored moments.
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
