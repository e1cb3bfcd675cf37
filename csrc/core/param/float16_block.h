// Stochastic rounding as in float16.h, for many values at once: as normal values and in steps of
// 2^-24, of which one is taken. Infinities and NaN are left to the definition.
//
// Included by float16.h, at its end, and by nothing else.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include "core/vector_avx512.h"
#else
#include "core/vector_avx2.h"
#endif

namespace lowbit {

/// stored[i] = store(x[i], random16[i])
LB_HD void store_block(Float16Stochastic, const float* x, uint16_t* stored, int n,
                       const uint16_t* random16) {
  using V = Vector;
  const auto one_half = V::all(0.5f), normal_from = V::all(0x1p-14f);
  int i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) {
    const auto a = V::load(x + i), m = V::magnitude(a);
    if (__builtin_expect(!V::every(V::at_least(V::all(bits_float(kInfinityBits - 1)), m)), 0)) {
      for (int j = i; j < i + V::kLanes; ++j) stored[j] = half_stochastic(x[j], random16[j]);
      continue;
    }
    const auto r = V::load_chance(random16 + i);
    const auto normal =
        V::smaller_words(V::down<13>(V::plus(V::plus(V::bits(m), V::down<3>(r)),
                                             V::all_words(-static_cast<int>(112u << 23)))),
                         V::all_words(0x7bff));
    // An exact step is found as the one below and all of the way to the next: with the same sum.
    const auto steps = V::times(V::smaller(m, normal_from), V::all(0x1p24f));
    const auto whole = V::nearest_integer(V::minus(steps, one_half));
    const auto left = V::times(V::minus(steps, whole), V::all(65536.0f));
    const auto chance = V::plus(V::to_float(r), one_half);
    const auto above = V::floats(V::plus(V::bits(chance), V::all_words(1)));  // the next float
    const auto small = V::next_where(V::rounded(whole), V::at_least(left, above));
    const auto h = V::choose(V::at_least(m, normal_from), V::floats(small), V::floats(normal));
    const auto sign = V::both(V::down<16>(V::bits(a)), V::all_words(0x8000));
    V::store_halves(stored + i, V::plus(V::bits(h), sign));
  }
  for (; i < n; ++i) stored[i] = half_stochastic(x[i], random16[i]);
}

}  // namespace lowbit
