// Scales of codes that are evenly spaced in log2 |x|. z is the code before rounding.
//
//   fixed      S = log2 absmax + 126
//              z = (log2 x + 126) * 255 / S
//   adaptive   lowest = log2 absmin, S = log2 absmax - lowest
//              z = (log2 x - lowest) * steps / S + 1,  0 where x = 0
//   signed     as adaptive, with the sign of x
//
// absmin is the smallest nonzero magnitude of the block. Logarithms are clamped to [-126, 126]:
// magnitudes outside count as 2^-126 or 2^126. A block with a single magnitude has
// lowest = log2 - 1. absmax == 0: the block dequantizes to zero. absmax not finite: the block
// dequantizes to NaN.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/log2.h"

namespace lowbit {

/// log2 of a magnitude, clamped to [2^-126, 2^126].
LB_HD Log2 log2_limited(float a) {
  constexpr float kMin = 0x1p-126f, kMax = 0x1p126f;
  a = a > kMin ? a : kMin;
  return log2_normal(a < kMax ? a : kMax);
}

struct FixedLogScale {
  using Stored = float;
  static constexpr int kStored = 1;
  static constexpr bool kNeedsMin = false;
  static constexpr int kSteps = 255;
  static constexpr bool kCurved = true;
  float range, step, inverse;
  bool coded;

  LB_HD static FixedLogScale of(uint32_t absmax, uint32_t) {
    if (absmax >= kInfinityBits) return {bits_float(kCanonicalNan), 0.0f, 0.0f, false};
    if (absmax == 0) return {0.0f, 0.0f, 0.0f, false};
    const Log2 l = log2_limited(bits_float(absmax));
    const float range = (l.whole + 126.0f) + l.part, used = range > 1e-12f ? range : 1e-12f;
    return {used, used / kSteps, kSteps / used, true};
  }
  LB_HD static FixedLogScale read(const Stored* s) { return {*s, *s / kSteps, 0.0f, true}; }
  LB_HD void write(Stored* s) const { *s = range; }
  LB_HD float to_z(float x) const {
    const Log2 l = log2_limited(x);
    const float z = ((l.whole + 126.0f) + l.part) * inverse;
    return z > 0.0f ? z : 0.0f;
  }
  LB_HD float from_z(float z) const { return range == 0.0f ? 0.0f : binary_exp(z * step, -126.0f); }
};

/// kRange is the number of octaves below absmax that codes reach; 0 reaches down to the block's
/// smallest nonzero magnitude. Signed values below half of the smallest code's value become zero.
template <int kSteps, bool kWithSign, int kRange>
struct AdaptiveLogScale {
  using Stored = float;
  static constexpr int kStored = 2;
  static constexpr bool kNeedsMin = true, kCurved = true;
  float range, lowest;
  // lowest = whole + part, separate so that differences of logarithms keep their precision.
  float whole, part;
  float step, inverse;
  bool coded;

  LB_HD static AdaptiveLogScale of(uint32_t absmax, uint32_t absmin) {
    constexpr float kNan = bits_float(kCanonicalNan);
    if (absmax >= kInfinityBits) return {kNan, kNan, 0.0f, 0.0f, 0.0f, 0.0f, false};
    if (absmax == 0) return {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, false};
    const Log2 top = log2_limited(bits_float(absmax));
    const Log2 bottom = log2_limited(bits_float(absmin < absmax ? absmin : absmax));
    const float highest = top.whole + top.part;
    float lowest = bottom.whole + bottom.part;
    if (kRange != 0 && lowest < highest - kRange) lowest = highest - kRange;
    if (lowest >= highest) lowest = highest - 1.0f;
    float range = highest - lowest;
    if (range < 1e-12f) range = 1e-12f;
    return from(range, lowest);
  }
  LB_HD static AdaptiveLogScale read(const Stored* s) { return from(s[0], s[1]); }
  LB_HD void write(Stored* s) const { s[0] = range, s[1] = lowest; }

  LB_HD float to_z(float x) const {
    const float a = bits_float(magnitude_bits(x));
    const Log2 l = log2_limited(a);
    const float above = (l.whole - whole) + (l.part - part);
    const float steps = above * inverse;
    float z = (steps > 0.0f ? steps : 0.0f) + 1.0f;
    z = z < kSteps + 1.0f ? z : kSteps + 1.0f;
    if constexpr (kWithSign) {
      z = a > 0.0f && above >= -1.0f ? z : 0.0f;
      return x < 0.0f ? -z : z;
    } else {
      return x > 0.0f ? z : 0.0f;
    }
  }
  LB_HD float from_z(float z) const {
    const float a = kWithSign ? bits_float(magnitude_bits(z)) : z;
    const float value = binary_exp((a - 1.0f) * step + part, whole);
    const float x = a > 0.0f ? value : step * 0.0f;  // NaN if the scale is NaN
    return kWithSign && z < 0.0f ? -x : x;
  }

 private:
  LB_HD static AdaptiveLogScale from(float range, float lowest) {
    const float whole = nearest_integer(lowest);
    return {range, lowest, whole, lowest - whole, range / kSteps, kSteps / range, true};
  }
};

}  // namespace lowbit
