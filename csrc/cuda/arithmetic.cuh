// Arithmetic of the fixed kernels: hardware's approximations with known errors, exact division for
// operands in a known range, and the packing of bytes.
//
// IEEE division and square root take a branch each for operands near the ends of the range. Kernels
// check the range of 8 values at once and call these functions in its middle.
#pragma once

#include "core/bits.h"
#include "core/half.h"
#include "core/param/bfloat16.h"

namespace lowbit::cuda {

// Without a GPU the approximations err by up to a step, one way or the other.
#if !defined(__CUDA_ARCH__)
inline float off_by_a_step(float x) {
  const uint32_t b = float_bits(x);
  return b - 0x00800000u < 0x7f000000u ? bits_float(b + b * 0x9E3779B9u % 3 - 1) : x;
}
#endif

/// sqrt(x) within 2^-23 of itself for x >= 0. Subnormal x counts as 0.
__device__ __forceinline__ float sqrt_approx(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return magnitude_bits(x) < 0x00800000u ? 0.0f : off_by_a_step(__builtin_sqrtf(x));
#endif
}

/// 1 / x within 2^-23 of itself for 2^-126 <= |x| <= 2^126.
__device__ __forceinline__ float reciprocal_approx(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return off_by_a_step(1.0f / x);
#endif
}

/// 1 / x, rounded to nearest, for 2^-100 <= x <= 2^100: the steps of the compiler's own division
/// between its checks.
__device__ __forceinline__ float reciprocal_in_range(float x) {
#if defined(__CUDA_ARCH__)
  const float y = reciprocal_approx(x);
  return fmaf(y, fmaf(-x, y, 1.0f), y);
#else
  return 1.0f / x;
#endif
}

/// x / d, rounded to nearest, with y = 1 / d to nearest; for d and x / d in [2^-100, 2^100] and
/// |x| >= 2^-90. Also the compiler's own steps.
__device__ __forceinline__ float divide_in_range(float x, float d, float y) {
#if defined(__CUDA_ARCH__)
  const float q = x * y;
  return fmaf(fmaf(-d, q, x), y, q);
#else
  static_cast<void>(y);
  return x / d;
#endif
}

/// sqrt(x), rounded to nearest, for 2^-100 <= x < infinity.
__device__ __forceinline__ float sqrt_in_range(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  const float root = x * y;
  return fmaf(fmaf(-root, root, x), y * 0.5f, root);
#else
  return __builtin_sqrtf(x);
#endif
}

/// A finite x, rounded to the nearest float16.
__device__ __forceinline__ float half_rounded(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("{ .reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(y) : "f"(x));
  return y;
#else
  return half_to_float(half_nearest(x));
#endif
}

/// The bits of x + base, rounded down. With an integer `base` beyond 2^23 their lowest byte is that
/// of floor(x) + base.
__device__ __forceinline__ uint32_t floor_bits(float x, float base) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("add.rm.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(base));
  return float_bits(y);
#else
  return float_bits(__builtin_floorf(x) + base);
#endif
}

/// The bits of the larger magnitude; a NaN if there is one.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(fabsf(a)), "f"(fabsf(b)));
  return y;
#else
  const uint32_t x = magnitude_bits(a), y = magnitude_bits(b);
  return bits_float(x > y ? x : y);
#endif
}
__device__ __forceinline__ float smaller_magnitude(float a, float b) {
  return fminf(fabsf(a), fabsf(b));
}

/// Two floats, rounded to the nearest bfloat16.
__device__ __forceinline__ uint32_t nearest_two(float even, float odd) {
#if defined(__CUDA_ARCH__)
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(odd), "f"(even));
  return y;
#else
  return bfloat16_nearest(even) | static_cast<uint32_t>(bfloat16_nearest(odd)) << 16;
#endif
}

/// A byte of a word, times 4: the place of a code's value in a table of floats.
__device__ __forceinline__ uint32_t byte_times_4(uint32_t word, int byte) {
#if defined(__CUDA_ARCH__)
  return __dp4a(word, 4u << (8 * byte), 0u);
#else
  return (word >> (8 * byte) & 255u) * 4;
#endif
}
/// The upper half of a word, times 4.
__device__ __forceinline__ uint32_t upper_half_times_4(uint32_t word) {
#if defined(__CUDA_ARCH__)
  return __dp2a_lo(word, 4u << 8, 0u);
#else
  return (word >> 16) * 4;
#endif
}

/// PTX's prmt: byte i of the result is the byte of (b, a) that digit i names. With 8 added to a
/// digit it is the sign of that byte, as zeros or ones.
template <uint32_t kDigits>
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "n"(kDigits));
  return y;
#else
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t y = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = kDigits >> (4 * i) & 15u;
    const auto byte = static_cast<uint32_t>(both >> (8 * (digit & 7u)) & 255u);
    y |= (digit < 8 ? byte : byte >> 7 ? 255u : 0u) << (8 * i);
  }
  return y;
#endif
}

/// The highest bytes of four words.
__device__ __forceinline__ uint32_t top_bytes(const uint32_t* w) {
  return permute<0x5410>(permute<0x0073>(w[0], w[1]), permute<0x0073>(w[2], w[3]));
}
/// The lowest bytes of four words.
__device__ __forceinline__ uint32_t low_bytes(const uint32_t* w) {
  return permute<0x5410>(permute<0x0040>(w[0], w[1]), permute<0x0040>(w[2], w[3]));
}
/// The signs of four words, a byte of zeros or ones each.
__device__ __forceinline__ uint32_t sign_bytes(const uint32_t* w) {
  return permute<0x5410>(permute<0x00fb>(w[0], w[1]), permute<0x00fb>(w[2], w[3]));
}
/// The upper halves of two words.
__device__ __forceinline__ uint32_t upper_halves(uint32_t low, uint32_t high) {
  return permute<0x7632>(low, high);
}

}  // namespace lowbit::cuda
