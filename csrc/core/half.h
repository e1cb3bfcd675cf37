// float16 and back. Written out, and not left to F16C or __half, so that every processor gives the
// same bits, NaN included.
#pragma once

#include <cstdint>

#include "core/bits.h"

namespace lowbit {

constexpr uint16_t kCanonicalNanHalf = 0x7e00u;
constexpr uint32_t kInfinityHalf = 0x7c00u;

/// Exact for every value. The exponent is rebiased by a multiplication, which also normalises
/// subnormals; the largest exponent is infinity or NaN, whose payload is kept.
LB_HD float half_to_float(uint16_t h) {
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const float finite = bits_float(magnitude) * bits_float(0x77800000u);  // 2^112
  const uint32_t bits = magnitude >= 0x0f800000u ? magnitude | kInfinityBits : float_bits(finite);
  return bits_float(bits | sign);
}

constexpr uint32_t kLeastNormalHalf = 0x38800000u;  // 2^-14 as float32 bits

/// To nearest, ties to even; 65520 and above become infinity, as in IEEE 754 and torch; every NaN
/// becomes 0x7e00.
///
/// Below 2^-14 all values are multiples of 2^-24, the last place of 0.5f: adding 0.5f rounds there.
LB_HD uint16_t half_nearest(float x) {
  const uint32_t b = float_bits(x);
  const uint32_t magnitude = b & 0x7fffffffu;
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
  uint32_t rounded = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
  if (magnitude < kLeastNormalHalf) rounded = subnormal;
  if (magnitude >= 0x477ff000u) rounded = kInfinityHalf;  // 65520
  rounded |= (b >> 16) & 0x8000u;
  return static_cast<uint16_t>(is_nan_bits(b) ? kCanonicalNanHalf : rounded);
}

/// One of the two neighbours of x: the one further from zero with probability (x - lower) / (upper
/// - lower), in 1/65536, so the mean over all random16 is x. What float32 knows of x beyond that
/// (only below 2^-14) is rounded to nearest first: an error of at most 2^-17 of a step.
///
/// Finite stays finite: beyond 65504 the largest finite value is stored. Infinity stays, every NaN
/// becomes 0x7e00.
LB_HD uint16_t half_stochastic(float x, uint32_t random16) {
  const uint32_t b = float_bits(x);
  const uint32_t magnitude = b & 0x7fffffffu;
  uint32_t rounded = ((magnitude + (random16 >> 3)) >> 13) - (112u << 10);
  if (magnitude < kLeastNormalHalf) {
    const float scaled = bits_float(magnitude) * bits_float(0x53800000u);  // 2^40: steps * 65536
    const int32_t whole = static_cast<int32_t>(scaled);
    const int32_t up = scaled - static_cast<float>(whole) >= 0.5f ? 1 : 0;
    rounded = (static_cast<uint32_t>(whole + up) + random16) >> 16;
  }
  if (magnitude >= 0x477fe000u) rounded = kInfinityHalf - 1u;  // 65504, so that finite stays finite
  if (magnitude >= kInfinityBits) rounded = kInfinityHalf;
  rounded |= (b >> 16) & 0x8000u;
  return static_cast<uint16_t>(is_nan_bits(b) ? kCanonicalNanHalf : rounded);
}

}  // namespace lowbit
