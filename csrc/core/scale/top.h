// One float32 scale per block, which maps the block's largest magnitude to the largest value of the
// code, for codes whose range is not [-1, 1].
//
//   scale = absmax / top,  z = x / scale        x ~ value(code) * scale
//
// absmax == 0: scale 0, every code the code of zero. A scale below 2^-126 becomes 2^-126, so it is
// never zero and dividing by it scales values exactly. absmax not finite: scale NaN, every code the
// code of zero, and the whole block dequantizes to NaN.
#pragma once

#include <cstdint>

#include "core/bits.h"

namespace lowbit {

template <int kTop>
struct TopScale {
  using Stored = float;
  static constexpr int kStored = 1;
  static constexpr bool kNeedsMin = false;
  float scale;
  bool coded;

  LB_HD static TopScale of(uint32_t absmax, uint32_t) {
    if (absmax >= kInfinityBits) return {bits_float(kCanonicalNan), false};
    if (absmax == 0) return {0.0f, false};
    const float scale = bits_float(absmax) / static_cast<float>(kTop);
    constexpr float kSmallest = 0x1p-126f;
    return {scale < kSmallest ? kSmallest : scale, true};
  }
  LB_HD static TopScale read(const Stored* s) { return {*s, true}; }
  LB_HD void write(Stored* s) const { *s = scale; }
  LB_HD float to_z(float x) const { return x / scale; }
  LB_HD float from_z(float z) const { return z * scale; }
};

}  // namespace lowbit
