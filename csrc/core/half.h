// Conversions between float32 and float16, the 16-bit IEEE format.
#pragma once

#include <cstdint>

#include "core/bits.h"

namespace lowbit {

/// Exact for every value. A multiplication rebiases the exponent and also normalizes subnormals.
/// The largest exponent is infinity or NaN, and a NaN keeps its payload.
LB_HD constexpr float half_to_float(uint16_t stored) {
  const uint32_t magnitude = static_cast<uint32_t>(stored & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(stored & 0x8000u) << 16;
  const float finite = bits_float(magnitude) * bits_float(0x77800000u);  // 2^112
  const uint32_t bits = magnitude >= 0x0f800000u ? magnitude | kInfinityBits : float_bits(finite);
  return bits_float(bits | sign);
}

/// The nearest float16, ties to even. Values from 65520 on become infinity and every NaN becomes
/// 0x7e00. Adding a number whose last place is that of the subnormals rounds them.
LB_HD constexpr uint16_t half_nearest(float x) {
  const uint32_t m = magnitude_bits(x);
  const uint32_t sign = (float_bits(x) >> 16) & 0x8000u;
  const uint32_t normal = (m + 0xfffu + ((m >> 13) & 1u) - (112u << 23)) >> 13;
  const uint32_t subnormal = float_bits(bits_float(m) + 0.5f) - float_bits(0.5f);
  uint32_t h = m < 0x38800000u ? subnormal : normal;  // 2^-14
  if (m >= 0x47800000u) h = 0x7c00u;                  // 2^16
  return static_cast<uint16_t>(is_nan_bits(m) ? 0x7e00u : h | sign);
}

}  // namespace lowbit
