// What the stochastic quantizers of vectors share (V: core/vector_avx2.h, core/vector_avx512.h).
//
// Positions are in steps of 2^-16, so that the upper half of a word is the code below a value and
// the lower half its share of the way to the next one. dynamic8_chance.h says how share and random
// bits decide, and what is unsure.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

/// The sum of positions and chance, whose upper halves are the codes. Bit 15 of `near` tells that
/// the upper code is the nearer one. A value is unsure where the lower half of `least` is below
/// kUnsure.
template <int kUnsure, class V>
LB_HD typename V::Int add_chance(typename V::Int position, typename V::Int near,
                                 const uint16_t* random16, typename V::Int& least) {
  const auto flipped =
      V::template flip_below<15>(near, V::load_chance(random16), V::all_words(0xffff));
  const auto sum = V::plus(V::plus(position, V::all_words(kUnsure / 2)), flipped);
  least = V::smaller_halves(V::plus(near, V::all_words(0x8000 + kUnsure / 2)), sum);
  return sum;
}

/// Calls define(i) for those of kCount registers of values that are unsure. smaller(a, b) is unsure
/// where one of both is.
template <class V, int kCount, class Smaller, class Unsure, class Define>
LB_HD void define_where(const typename V::Int (&least)[kCount], const Smaller& smaller,
                        const Unsure& unsure, const Define& define) {
  auto minimum = least[0];
  for (int v = 1; v < kCount; ++v) minimum = smaller(minimum, least[v]);
  if (__builtin_expect(unsure(minimum) == 0, 1)) return;
  for (int v = 0; v < kCount; ++v) {
    for (uint32_t left = unsure(least[v]); left != 0; left &= left - 1)
      define(v * V::kLanes + __builtin_ctz(left));
  }
}

/// The same for values that are unsure where the lower half of a word is below kUnsure.
template <class V, int kUnsure, int kCount, class Define>
LB_HD void define_unsure(const typename V::Int (&least)[kCount], const Define& define) {
  using Int = typename V::Int;
  define_where<V>(
      least, [](Int a, Int b) LB_LAMBDA { return V::smaller_halves(a, b); },
      [](Int a) LB_LAMBDA { return V::template unsure<kUnsure>(a); }, define);
}

}  // namespace lowbit
