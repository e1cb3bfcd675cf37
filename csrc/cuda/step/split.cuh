// Split bfloat16 parameters of 8 values, with the bits of core/param/split.h: where all 8 are
// between 2^-63 and 2^65, half a step is a normal power of two, which one subtraction finds.
#pragma once

#include "core/param/split.h"
#include "cuda/arithmetic.cuh"
#include "cuda/format.cuh"

namespace lowbit::cuda {

template <class P>
concept IsSplit = __is_same(P, BFloat16Split8) || __is_same(P, BFloat16Split16);

/// Whether bfloat16 magnitudes, two in a word, are in [2^-63, 2^65): the upper two bits of their
/// exponents differ.
__device__ __forceinline__ bool are_moderate(const uint32_t (&words)[4]) {
  uint32_t differ = ~0u;
  for (uint32_t w : words) differ &= w ^ (w << 1);
  return (differ & 0x40004000u) == 0x40004000u;
}

/// -c / kMax, rounded to nearest: an approximation, then its error (test_cuda_fixed tries every c).
template <class P>
__device__ __forceinline__ float negative_share(typename P::Compensation c) {
  constexpr float kInverse = 1.0f / P::kMax;
  const float x = static_cast<float>(-static_cast<int32_t>(c)), q = x * kInverse;
  return fmaf(fmaf(-P::kMax, q, x), kInverse, q);
}

/// The bits of half a step of a moderate parameter.
__device__ __forceinline__ uint32_t half_step_bits(float p) {
  return (float_bits(p) & kInfinityBits) - (8u << 23);
}

template <class P, int kMany>
__device__ __forceinline__ void load_split(const Pack8<uint16_t>& param,
                                           const CompensationPack<P>& compensation,
                                           float (&p)[kMany]) {
  if (are_moderate(param.word)) {
    for (int e = 0; e < kMany; ++e) {
      const float stored = bfloat16_to_float(param.get(e));
      p[e] = stored - negative_share<P>(compensation.get(e)) * bits_float(half_step_bits(stored));
    }
  } else {
    for (int e = 0; e < kMany; ++e) p[e] = P::load(param.get(e), compensation.get(e));
  }
}

template <class P, int kMany>
__device__ __forceinline__ void store_split(const float (&p)[kMany], Pack8<uint16_t>& param,
                                            CompensationPack<P>& compensation) {
  for (int i = 0; i < kMany / 2; ++i) param.word[i] = nearest_two(p[2 * i], p[2 * i + 1]);
  if (are_moderate(param.word)) {
    for (int e = 0; e < kMany; ++e) {
      const float stored = bfloat16_to_float(param.get(e)), rest = p[e] - stored;
      const float steps = bits_float((254u << 23) - half_step_bits(stored));
      const float share = fminf(fabsf(rest * steps), 1.0f);
      const auto rounded = static_cast<int32_t>(share * P::kMax + 0.5f);
      compensation.set(e, static_cast<typename P::Compensation>(rest < 0.0f ? -rounded : rounded));
    }
  } else {
    for (int e = 0; e < kMany; ++e) {
      typename P::Compensation c{};
      param.set(e, P::store(p[e], 0, c));
      compensation.set(e, c);
    }
  }
}

}  // namespace lowbit::cuda
