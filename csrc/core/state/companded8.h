// FlashOptim's 8-bit codes: the values of a block of 32 divided by its largest magnitude
// (core/scale/half.h), companded so that small values get more of the codes.
//
//   signed     t = 2 z / (1 + |z|)   z = t / (2 - |t|)   code - 127 = floor(127 t + 1/2)
//   unsigned   z = sqrt(x) / a       x = (z a)^2         code       = floor(255 z + 1/2)
//
// A tie goes to the larger value. Unsigned: a positive value never becomes zero but the smallest
// step, where FlashOptim writes zero. Signed: FlashOptim stores code - 127 as int8.
#pragma once

#include <cstdint>

#include "core/scale/half.h"
#include "core/state/codebook.h"

namespace lowbit {

struct CompandedCode {
  static constexpr const char* kDtype = "uint8";
  static constexpr int kBits = 8, kBlock = 32;
  static constexpr bool kScaled = true;
  using Storage = uint8_t;

  /// floor(t * top + 1/2), clamped to [-top, top]; below it, -top - 1. Both ends are clamped before
  /// the conversion, because a conversion that overflows is undefined in C++.
  LB_HD static int32_t nearest(float t, float top) {
    const float y = t * top + 0.5f;
    const float low = y < top ? y : top;
    const int32_t cut = static_cast<int32_t>(low > -top ? low : -top);
    return cut - (static_cast<float>(cut) > y);
  }
};

/// The values z of the signed codes: a lookup instead of two divisions.
struct SoftsignTable {
  alignas(64) float value[256] = {};
  constexpr SoftsignTable() {
    for (int code = 0; code < 256; ++code) {
      const int k = (code < 254 ? code : 254) - 127;
      const float t = static_cast<float>(k) / 127.0f;
      value[code] = t / (2.0f - (t < 0.0f ? -t : t));
    }
  }
};
LB_TABLE SoftsignTable kSoftsignTable{};

struct Companded8 : CompandedCode {
  static constexpr const char* kName = "companded8";
  static constexpr const char* kDomain = "softsign";
  static constexpr int kCodes = 255;
  static constexpr bool kSigned = true;
  static constexpr uint32_t kZeroCode = 127;
  using Scale = HalfScale<false>;

  LB_HD static float dequantize(uint32_t code) { return kSoftsignTable.value[code]; }
  LB_HD static uint32_t quantize(float z) {
    const float t = 2.0f * z / (1.0f + bits_float(magnitude_bits(z)));
    const int32_t k = nearest(t, 127.0f);
    return static_cast<uint32_t>((k > -127 ? k : -127) + 127);
  }
  LB_HD static constexpr uint32_t neighbour(uint32_t code, bool up) {
    if (up) return code < 254 ? code + 1 : code;
    return code > 0 ? code - 1 : code;
  }
};

struct Companded8Unsigned : CompandedCode {
  static constexpr const char* kName = "companded8_unsigned";
  static constexpr const char* kDomain = "sqrt";
  static constexpr int kCodes = 256;
  static constexpr bool kSigned = false;
  static constexpr uint32_t kZeroCode = 0;
  using Scale = HalfScale<true>;

  LB_HD static float dequantize(uint32_t code) {
    return static_cast<float>(static_cast<int32_t>(code)) / 255.0f;
  }
  LB_HD static uint32_t quantize(float z) {
    const int32_t code = nearest(z, 255.0f);
    return static_cast<uint32_t>(z > 0.0f ? (code > 1 ? code : 1) : 0);
  }
  LB_HD static constexpr uint32_t neighbour(uint32_t code, bool up) {
    if (up) return code < 255 ? code + 1 : code;
    return code > 1 ? code - 1 : code;
  }
};

#if !defined(__CUDACC__)
LB_HD void dequantize_block(Companded8, const uint8_t* codes, const HalfScale<false>& scale,
                            float* out, int n) {
  codebook_dequantize<8>(codes, scale.scale, kSoftsignTable.value, out, n);
}
#endif

}  // namespace lowbit

#if defined(__AVX2__) && defined(__FMA__) && !defined(__CUDACC__)
#include "core/state/companded8_block.h"
#endif
