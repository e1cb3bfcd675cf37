// 8-bit floats, torch's float8_e4m3fn and float8_e5m2. One float32 scale per block maps the largest
// magnitude to the format's largest value (core/scale/top.h).
//
// A code is the byte of the float: a sign and a magnitude, rounded half to even and clamped to the
// largest finite value. Minus zero is written as zero. Unsigned: the same bytes without the sign,
// and a positive value never becomes zero but the smallest subnormal.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/scale/top.h"

namespace lowbit {

template <int kMantissa, int kTopCode, int kTopValue, bool kWithSign>
struct Float8Code {
  static constexpr const char* kDtype = "uint8";
  static constexpr const char* kDomain = "linear";
  static constexpr int kBits = 8, kBlock = 256;
  static constexpr bool kScaled = true, kSigned = kWithSign, kTieUp = false;
  static constexpr uint32_t kZeroCode = 0;
  using Storage = uint8_t;
  using Scale = TopScale<kTopValue>;
  static constexpr int kTop = kTopCode;  // the largest magnitude that is written
  static constexpr int kMaximum = kTopValue;
  static constexpr int kShift = 23 - kMantissa, kBias = (1 << (6 - kMantissa)) - 1;

  /// A multiplication rebiases the exponent and also normalizes subnormals. Codes beyond the
  /// largest finite value, which are never written, have torch's meaning.
  LB_HD static float dequantize(uint32_t code) {
    const uint32_t m = code & 0x7fu, sign = (code & 0x80u) << 24;
    constexpr float kRebias = bits_float(static_cast<uint32_t>(254 - kBias) << 23);
    uint32_t bits = float_bits(bits_float(m << kShift) * kRebias);
    if (m > kTopCode) {
      bits = kMantissa == 2 && m == kTopCode + 1 ? kInfinityBits : kCanonicalNan;
    }
    return bits_float(bits | sign);
  }

  LB_HD static uint32_t quantize(float z) {
    // As integers: positive floats have the order of their bits, and negative ones are below zero.
    constexpr int32_t kMin = (128 - kBias - kMantissa) << 23;
    const int32_t bits = static_cast<int32_t>(float_bits(z)), raised = bits > kMin ? bits : kMin;
    const uint32_t m = kWithSign ? magnitude_bits(z) : static_cast<uint32_t>(raised & -(bits > 0));
    constexpr uint32_t kLast = 1u << kShift, kRebias = static_cast<uint32_t>(127 - kBias) << 23;
    const uint32_t normal = (m + (kLast / 2 - 1) + ((m >> kShift) & 1u) - kRebias) >> kShift;
    // Adding a number whose last place is the smallest subnormal rounds to it.
    constexpr float kPush = bits_float(static_cast<uint32_t>(127 + 24 - kBias - kMantissa) << 23);
    const uint32_t subnormal = float_bits(bits_float(m) + kPush) - float_bits(kPush);
    constexpr uint32_t kMinNormal = kRebias + (1u << 23);
    uint32_t code = m < kMinNormal ? subnormal : normal;
    if (m > float_bits(static_cast<float>(kTopValue))) code = kTopCode;
    if (kWithSign) code |= code != 0 ? (float_bits(z) >> 24) & 0x80u : 0;
    return code;
  }

  LB_HD static constexpr uint32_t neighbour(uint32_t code, bool up) {
    const uint32_t m = code & 0x7fu, sign = code & 0x80u;
    if (up == (sign == 0) || (m == 0 && kWithSign)) {  // away from zero
      const uint32_t side = m == 0 ? (up ? 0 : 0x80u) : sign;
      return m < kTopCode ? side | (m + 1) : code;
    }
    if (!kWithSign && m <= 1) return code;
    return m == 1 ? 0 : sign | (m - 1);
  }
};

struct Float8E4M3 : Float8Code<3, 0x7e, 448, true> {
  static constexpr const char* kName = "float8_e4m3";
};
struct Float8E4M3Unsigned : Float8Code<3, 0x7e, 448, false> {
  static constexpr const char* kName = "float8_e4m3_unsigned";
};
struct Float8E5M2 : Float8Code<2, 0x7b, 57344, true> {
  static constexpr const char* kName = "float8_e5m2";
};
struct Float8E5M2Unsigned : Float8Code<2, 0x7b, 57344, false> {
  static constexpr const char* kName = "float8_e5m2_unsigned";
};

}  // namespace lowbit

#if defined(__AVX2__) && defined(__FMA__) && !defined(__CUDACC__)
#include "core/state/float8_block.h"
#endif
