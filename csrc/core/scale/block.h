// The scale of most formats: one float32, the largest magnitude of the values it covers.
//
//   scale = absmax,  z = x * (1 / scale)        x ~ map(code) * scale
//
//   absmax == 0:           scale 0, every code the code of zero.
//   0 < absmax < 2^-126:   scale 2^-126, so that the reciprocal is finite and a positive second
//                          moment cannot become zero.
//   absmax not finite:     scale NaN, every code the code of zero: the whole block dequantizes to
//                          the same NaN on every processor.
#pragma once

#include <cstdint>

#include "core/bits.h"

namespace lowbit {

constexpr uint32_t kNoMin = 0xffffffffu;  // the minimum of a block without nonzero values

struct BlockScale {
  using Stored = float;
  static constexpr int kStored = 1;         // numbers stored per block
  static constexpr bool kNeedsMin = false;  // whether `of` reads the smallest magnitude
  float scale, inverse;
  bool coded;  // false: every code is the format's code of zero

  /// The scale from the bits of the largest magnitude and of the smallest nonzero one.
  LB_HD static BlockScale of(uint32_t absmax, uint32_t) {
    if (absmax >= kInfinityBits) return {bits_float(kCanonicalNan), 0.0f, false};
    if (absmax == 0) return {0.0f, 0.0f, false};
    constexpr uint32_t kSmallest = 0x00800000u;  // 2^-126
    const float scale = bits_float(absmax < kSmallest ? kSmallest : absmax);
    return {scale, 1.0f / scale, true};
  }
  /// The scale for dequantizing.
  LB_HD static BlockScale read(const float* stored) { return {*stored, 0.0f, true}; }
  LB_HD void write(float* stored) const { *stored = scale; }
  LB_HD float to_z(float x) const { return x * inverse; }
  LB_HD float from_z(float z) const { return z * scale; }
};

}  // namespace lowbit
