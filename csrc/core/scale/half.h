// One float16 scale per block: the block's largest magnitude a, or its square root (kRoot).
//
//   a = max |u|,  u = x or sqrt(x),  scale = float16(a),  z = u / a        x ~ z * scale, squared
//
// Codes are computed with a before it is rounded (FlashOptim's definition). If a is outside the
// range of float16, the nearest positive finite float16 replaces it, 65504 or 2^-24, also in z, so
// values neither vanish nor grow. absmax == 0: scale 0, every code the code of zero. absmax not
// finite: scale NaN, every code the code of zero, and the whole block dequantizes to NaN.
#pragma once

#include <cstdint>

#include "core/half.h"

namespace lowbit {

template <bool kRoot>
struct HalfScale {
  using Stored = uint16_t;
  static constexpr int kStored = 1;
  static constexpr bool kNeedsMin = false, kCurved = kRoot;
  float scale, divisor;
  bool coded;

  LB_HD static HalfScale of(uint32_t absmax, uint32_t) {
    if (absmax >= kInfinityBits) return {bits_float(kCanonicalNan), 1.0f, false};
    if (absmax == 0) return {0.0f, 1.0f, false};
    const float a = kRoot ? __builtin_sqrtf(bits_float(absmax)) : bits_float(absmax);
    const uint16_t h = half_nearest(a);
    if (h == 0) return {0x1p-24f, 0x1p-24f, true};
    if (h >= 0x7c00u) return {65504.0f, 65504.0f, true};
    return {half_to_float(h), a, true};
  }
  LB_HD static HalfScale read(const Stored* s) { return {half_to_float(*s), 1.0f, true}; }
  LB_HD void write(Stored* s) const { *s = half_nearest(scale); }
  LB_HD float to_z(float x) const {
    return (kRoot ? __builtin_sqrtf(x > 0.0f ? x : 0.0f) : x) / divisor;
  }
  LB_HD float from_z(float z) const {
    const float u = z * scale;
    return kRoot ? u * u : u;
  }
};

}  // namespace lowbit
