// Codes evenly spaced in the logarithm (core/scale/log.h): a constant relative error for any range
// of the block. z is the code before rounding, half to even.
//
//   log8_fixed    0..255, from 2^-126 to absmax: no zero.
//                 adafactor-8bit's format of 0.2 and 0.3
//   log8, log16   0 is zero, 1..255 or 1..65535 from the block's smallest positive value to its
//                 largest. adafactor-8bit's formats since 0.4
//   log8_signed   128 is zero, 128 +- (1..127); magnitudes reach 24 octaves below the largest, and
//                 values below half of the smallest one are zero
#pragma once

#include <cstdint>

#include "core/scale/log.h"

namespace lowbit {

struct LogCode {
  static constexpr const char* kDomain = "log2";
  static constexpr bool kScaled = true, kTieUp = false;

  /// z rounded half to even and clamped to [minimum, maximum].
  LB_HD static int32_t nearest(float z, float minimum, float maximum) {
    z = z > minimum ? z : minimum;
    return to_integer(z < maximum ? z : maximum);
  }
};

struct Log8Fixed : LogCode {
  static constexpr const char* kName = "log8_fixed";
  static constexpr const char* kDtype = "uint8";
  static constexpr int kBits = 8, kBlock = 256, kCodes = 256;
  static constexpr bool kSigned = false;
  static constexpr uint32_t kZeroCode = 0;
  using Storage = uint8_t;
  using Scale = FixedLogScale;

  LB_HD static float dequantize(uint32_t code) {
    return static_cast<float>(static_cast<int32_t>(code));
  }
  LB_HD static uint32_t quantize(float z) {
    return static_cast<uint32_t>(nearest(z, 0.0f, 255.0f));
  }
  LB_HD static constexpr uint32_t neighbour(uint32_t code, bool up) {
    if (up) return code < 255 ? code + 1 : code;
    return code > 0 ? code - 1 : code;
  }
};

/// kTop is the largest code. Steps count from the lowest, one below the codes, and ties are between
/// steps.
template <int kTop>
struct AdaptiveLogCode : LogCode {
  static constexpr int kBlock = 256, kCodes = kTop + 1;
  static constexpr bool kSigned = false;
  static constexpr uint32_t kZeroCode = 0;
  using Scale = AdaptiveLogScale<kTop - 1, false, 0>;

  LB_HD static float dequantize(uint32_t code) {
    return static_cast<float>(static_cast<int32_t>(code));
  }
  LB_HD static uint32_t quantize(float z) {
    const int32_t code = nearest(z - 1.0f, 0.0f, static_cast<float>(kTop - 1)) + 1;
    return static_cast<uint32_t>(z > 0.0f ? code : 0);
  }
  LB_HD static constexpr uint32_t neighbour(uint32_t code, bool up) {
    if (up) return code < kTop ? code + 1 : code;
    return code > 1 ? code - 1 : code;
  }
};

struct Log8 : AdaptiveLogCode<255> {
  static constexpr const char* kName = "log8";
  static constexpr const char* kDtype = "uint8";
  static constexpr int kBits = 8;
  using Storage = uint8_t;
};

struct Log16 : AdaptiveLogCode<65535> {
  static constexpr const char* kName = "log16";
  // Two per code: gloo and NCCL cannot move 16-bit integers.
  static constexpr const char* kDtype = "uint8";
  static constexpr int kBits = 16;
  using Storage = uint16_t;
};

struct Log8Signed : LogCode {
  static constexpr const char* kName = "log8_signed";
  static constexpr const char* kDtype = "uint8";
  static constexpr int kBits = 8, kBlock = 256, kCodes = 256;
  static constexpr bool kSigned = true;
  static constexpr uint32_t kZeroCode = 128;
  using Storage = uint8_t;
  using Scale = AdaptiveLogScale<126, true, 24>;

  /// Code 0 is never written and means the same as code 1.
  LB_HD static float dequantize(uint32_t code) {
    const int32_t z = static_cast<int32_t>(code) - 128;
    return static_cast<float>(z > -127 ? z : -127);
  }
  LB_HD static uint32_t quantize(float z) {
    return static_cast<uint32_t>(nearest(z, -127.0f, 127.0f) + 128);
  }
  LB_HD static constexpr uint32_t neighbour(uint32_t code, bool up) {
    if (up) return code < 255 ? code + 1 : code;
    return code > 1 ? code - 1 : code;
  }
};

}  // namespace lowbit

#if defined(__FMA__) && !defined(__CUDACC__)
#include "core/state/log8_block.h"
#endif
