// Conversions between a float and its bits, and the canonical NaN.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

constexpr uint32_t kCanonicalNan = 0x7fc00000u;
constexpr uint32_t kInfinityBits = 0x7f800000u;

LB_HD constexpr uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
LB_HD constexpr float bits_float(uint32_t b) { return __builtin_bit_cast(float, b); }

/// |x| as an integer. Finite values keep their order, infinity ranks above them and every NaN above
/// infinity. A maximum over these integers does not depend on the order of evaluation and cannot
/// lose a NaN, as `fmax` does.
LB_HD constexpr uint32_t magnitude_bits(float x) { return float_bits(x) & 0x7fffffffu; }

LB_HD constexpr bool is_nan_bits(uint32_t b) { return (b & 0x7fffffffu) > kInfinityBits; }

/// All ones if b is negative as a signed integer, else zero.
LB_HD constexpr uint32_t all_if_negative(uint32_t b) {
  return static_cast<uint32_t>(static_cast<int32_t>(b) >> 31);
}

/// a where the mask is all ones, b where it is zero.
LB_HD constexpr float select(uint32_t mask, float a, float b) {
  return bits_float((float_bits(a) & mask) | (float_bits(b) & ~mask));
}

/// x where a and b are both positive or both negative, else y. Integers, not conditions: g++ makes
/// branches of those, and loops with branches are left without vectors.
LB_HD constexpr float where_same_sign(float a, float b, float x, float y) {
#if defined(__CUDACC__)
  return (a > 0.0f && b > 0.0f) || (a < 0.0f && b < 0.0f) ? x : y;
#else
  const auto positive = static_cast<uint32_t>(a > 0.0f) & static_cast<uint32_t>(b > 0.0f);
  const auto negative = static_cast<uint32_t>(a < 0.0f) & static_cast<uint32_t>(b < 0.0f);
  return select(0u - (positive | negative), x, y);
#endif
}

/// x, with every NaN replaced by one canonical NaN. Processors propagate different NaN payloads, so
/// stored values would otherwise differ.
LB_HD constexpr float canonical(float x) {
  return is_nan_bits(float_bits(x)) ? bits_float(kCanonicalNan) : x;
}

}  // namespace lowbit
