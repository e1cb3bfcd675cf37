// The scale that most formats share: one float32, the largest magnitude of what it covers.
//
//   scale = absmax,  z = x * (1 / scale)        x ~ map(code) * scale
//
// absmax == 0:           scale 0, every code the code of zero.
// 0 < absmax < 2^-126:   scale 2^-126, so that the reciprocal is finite and a positive second
//                        moment cannot become zero.
// absmax not finite:     scale NaN, every code the code of zero: the whole block decodes to NaN, on
//                        every processor the same one.
#pragma once

#include <cstdint>

#include "core/bits.h"

namespace lowbit {

constexpr uint32_t kNoLeast = 0xffffffffu;  // of a block without a value other than zero

struct BlockScale {
  using Stored = float;
  static constexpr int kStored = 1;           // numbers in memory for each block
  static constexpr bool kNeedsLeast = false;  // whether `of` looks at the least magnitude
  float scale, inverse;
  bool coded;  // false: every code is the format's code of zero

  /// From the bits of the largest magnitude, and of the least one that is not zero.
  LB_HD static BlockScale of(uint32_t most, uint32_t) {
    if (most >= kInfinityBits) return {bits_float(kCanonicalNan), 0.0f, false};
    if (most == 0) return {0.0f, 0.0f, false};
    constexpr uint32_t kSmallest = 0x00800000u;  // 2^-126
    const float scale = bits_float(most < kSmallest ? kSmallest : most);
    return {scale, 1.0f / scale, true};
  }
  /// For decoding.
  LB_HD static BlockScale read(const float* stored) { return {*stored, 0.0f, true}; }
  LB_HD void write(float* stored) const { *stored = scale; }
  LB_HD float to_z(float x) const { return x * inverse; }
  LB_HD float from_z(float z) const { return z * scale; }
};

}  // namespace lowbit
