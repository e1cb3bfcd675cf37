// The new parameters of 8 values by Adam's rules, with the bits of AdamRule::next and P::store.
//
// bfloat16 parameters: a bracket. With u = m / (sqrt(v) inv_sqrt_bc2 + eps) from approximations,
//
//     low = p - step_size (1 - 2^-20) u,   high = p - step_size (1 + 2^-20) u
//
// lie on either side of the exact result: in units of 2^-24, the roundings of u and of the exact
// share err by 8 at most, the two approximations by 4, and a subnormal v that counts as 0 by 2.
// Rounding to bfloat16 keeps the order, so where both ends become the same bfloat16, that is the
// result. Where they differ, which is rare, the lane computes it exactly.
//
// Other parameters: exact division and square root without the checks of each.
//
// Both hold for operands in a range that is checked for 8 values at once; outside of it every
// value takes core's functions.
#pragma once

#include "core/random.h"
#include "core/update/adam.h"
#include "cuda/arithmetic.cuh"
#include "cuda/step/fixed.cuh"
#include "cuda/step/split.cuh"

namespace lowbit::cuda {

/// What a step has in common for a tensor.
template <class U>
struct AdamStep {
  typename U::Coef coef;
  float low, high;  // step_size, changed a little, and negated
  // The bits of w ^ 2 w (below) that say that parameters are in range; other bits, which never
  // occur, where the coefficients are unusual.
  uint32_t in_range;
  bool ordinary;  // whether the coefficients are in range
  bool tiny_eps;  // whether a subnormal v counts beside eps

  static constexpr float kError = 0x1p-20f;

  /// normal: whether no v is subnormal, so that eps may be anything.
  __device__ __forceinline__ void set(const typename U::Coef& c, bool normal = false) {
    coef = c;
    low = -(c.step_size * (1.0f - kError)), high = -(c.step_size * (1.0f + kError));
    ordinary = (c.eps >= 0x1p-60f || normal) && c.eps <= 0x1p20f && c.inv_sqrt_bc2 >= 0x1p-10f &&
               c.inv_sqrt_bc2 <= 0x1p10f && c.step_size <= 0x1p20f &&
               (c.step_size >= 0x1p-34f || c.step_size == 0.0f) && c.decay >= 0.25f &&
               c.decay <= 2.0f;
    tiny_eps = c.inv_sqrt_bc2 * 0x1p-40f > c.eps && !normal;
    in_range = ordinary && !tiny_eps ? 0x40004000u : ~0u;
  }
};

/// The largest value of a lane, of |m| as a float, and of v as bits: a negative v is larger than
/// any.
struct Largest {
  float m;
  uint32_t v;
};
__device__ __forceinline__ float largest_magnitude(const float (&x)[kEach]) {
  float most = x[0];
  for (int e = 1; e < kEach; ++e) most = larger_magnitude(most, x[e]);
  return bits_float(magnitude_bits(most));
}
__device__ __forceinline__ uint32_t largest_bits(const float (&x)[kEach]) {
  uint32_t most = float_bits(x[0]);
  for (int e = 1; e < kEach; ++e) most = float_bits(x[e]) > most ? float_bits(x[e]) : most;
  return most;
}
__device__ __forceinline__ Largest largest_of(const float (&m)[kEach], const float (&v)[kEach]) {
  return {largest_magnitude(m), largest_bits(v)};
}

constexpr uint32_t kModerate = float_bits(0x1p40f);  // what m and v must be below

template <class P>
concept IsBFloat16 = __is_same(P, BFloat16Stochastic) || __is_same(P, BFloat16Nearest);

/// Whether the bracket holds although a parameter is 0, tiny or large, or eps is tiny.
template <class U>
__device__ __forceinline__ bool bracket_holds(const AdamStep<U>& step, const uint32_t* param,
                                              const float (&m)[kEach], const float (&v)[kEach]) {
  if (!step.ordinary) return false;
  bool holds = true;
  for (int e = 0; e < kEach; ++e) {
    const uint32_t p = (e % 2 ? param[e / 2] : param[e / 2] << 16) & 0x7fff0000u;
    const uint32_t u = float_bits(m[e]);
    holds = holds && p < float_bits(0x1p65f);
    holds = holds &&
            (p >= float_bits(0x1p-63f) || u == 0 || magnitude_bits(m[e]) >= float_bits(0x1p-60f));
    holds = holds && (!step.tiny_eps || v[e] == 0.0f || v[e] >= 0x1p-126f);
  }
  return holds;
}

/// Two parameters, rounded to bfloat16, for finite values; `random` has the bits of both.
template <class P>
__device__ __forceinline__ uint32_t round_two(float even, float odd, uint32_t random) {
  if constexpr (P::kRandom) {
    return upper_halves(float_bits(even) + (random & 0xffffu), float_bits(odd) + (random >> 16));
  } else {
    return nearest_two(even, odd);
  }
}

/// New parameters by core's functions.
template <class P>
__device__ __forceinline__ void store_each(const float (&next)[kEach], const Random8& random,
                                           Pack8<typename P::Storage>& param,
                                           CompensationPack<P>& compensation) {
  if constexpr (IsSplit<P>) {
    store_split<P>(next, param, compensation);
  } else {
    for (int e = 0; e < kEach; ++e) {
      typename P::Compensation c{};
      param.set(e, P::store(next[e], random.bits16(e), c));
      if constexpr (kHasCompensation<P>) compensation.set(e, c);
    }
  }
}

/// The same, with one check for 8 values.
template <class P>
__device__ __forceinline__ void store_next(const float (&next)[kEach], const Random8& random,
                                           Pack8<typename P::Storage>& param,
                                           CompensationPack<P>& compensation) {
  param.clear();
  if constexpr (IsBFloat16<P>) {
    if (float_bits(largest_magnitude(next)) < float_bits(0x1p100f)) {
      for (int i = 0; i < kEach / 2; ++i)
        param.word[i] = round_two<P>(next[2 * i], next[2 * i + 1], random.word[i]);
      return;
    }
  }
  store_each<P>(next, random, param, compensation);
}

template <class U, class P>
  requires IsBFloat16<P>
__device__ __forceinline__ void store_adam(const AdamStep<U>& step, const float (&p)[kEach],
                                           const float (&m)[kEach], const float (&v)[kEach],
                                           const Largest& largest, const Random8& random,
                                           Pack8<uint16_t>& param, CompensationPack<P>&) {
  uint32_t in_range = ~0u, differ = ~0u;
  for (uint32_t w : param.word) in_range &= w ^ (w << 1);  // two bits of the exponent differ
  bool holds = (in_range & 0x40004000u) == step.in_range;
  if (!holds) holds = bracket_holds(step, param.word, m, v);
  param.clear();
  if (holds && float_bits(largest.m) < kModerate && largest.v < kModerate) {
    differ = 0;
    for (int i = 0; i < kEach / 2; ++i) {
      float u[2];
      for (int k = 0; k < 2; ++k) {
        const float below = fmaf(sqrt_approx(v[2 * i + k]), step.coef.inv_sqrt_bc2, step.coef.eps);
        u[k] = m[2 * i + k] * reciprocal_approx(below);
      }
      const float* at = p + 2 * i;
      const uint32_t one =
          round_two<P>(fmaf(u[0], step.low, at[0]), fmaf(u[1], step.low, at[1]), random.word[i]);
      const uint32_t other =
          round_two<P>(fmaf(u[0], step.high, at[0]), fmaf(u[1], step.high, at[1]), random.word[i]);
      differ |= one ^ other;
      param.word[i] = one;
    }
  }
  if (differ != 0) {
    None none;
    for (int e = 0; e < kEach; ++e)
      param.set(e, P::store(U::next(p[e], m[e], v[e], step.coef), random.bits16(e), none));
  }
}

template <class U, class P>
__device__ __forceinline__ void store_adam(const AdamStep<U>& step, const float (&p)[kEach],
                                           const float (&m)[kEach], const float (&v)[kEach],
                                           const Largest& largest, const Random8& random,
                                           Pack8<typename P::Storage>& param,
                                           CompensationPack<P>& compensation) {
  float smallest_m = fabsf(m[0]), smallest_v = v[0];
  for (int e = 1; e < kEach; ++e) {
    smallest_m = smaller_magnitude(smallest_m, m[e]);
    smallest_v = fminf(smallest_v, v[e]);
  }
  float next[kEach];
  if (step.ordinary && float_bits(largest.m) < kModerate && largest.v < kModerate &&
      smallest_m >= 0x1p-55f && smallest_v >= 0x1p-100f) {
    for (int e = 0; e < kEach; ++e) {
      const float below = sqrt_in_range(v[e]) * step.coef.inv_sqrt_bc2 + step.coef.eps;
      const float share = divide_in_range(m[e], below, reciprocal_in_range(below));
      next[e] = p[e] - step.coef.step_size * share;
    }
  } else {
    for (int e = 0; e < kEach; ++e) next[e] = U::next(p[e], m[e], v[e], step.coef);
  }
  store_each<P>(next, random, param, compensation);
}

}  // namespace lowbit::cuda
