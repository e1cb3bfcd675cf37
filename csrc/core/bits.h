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

/// x, with every NaN replaced by one canonical NaN. Processors propagate different NaN payloads, so
/// stored values would otherwise differ.
LB_HD constexpr float canonical(float x) {
  return is_nan_bits(float_bits(x)) ? bits_float(kCanonicalNan) : x;
}

}  // namespace lowbit
