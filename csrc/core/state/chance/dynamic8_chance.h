// Stochastic codes of dynamic8.h, with the codes of stochastic.h.
//
// A value lies between two entries, `share` of the way from the lower to the upper one. Ordinal
// plus share is a line in |z| between entries: inside a decade, and from its last entry to the
// first one of the next decade, where the step grows threefold and then five thirds. Slopes only
// fall, so that the lower of two lines is the right one from the first entry of a decade to that of
// the next. The steps end with half a step from the last entry to one, a line of its own.
//
// The position is in steps of 2^-16, as in Dynamic8Steps. The nearest entry is kept unless
// r + 1/2 < share of the way to the other one. With r' = r where the upper entry is the nearer one,
// and 65535 - r otherwise, this is the upper half of position + r'. Where the lower half of that
// sum says that the last bits decide, and where they decide which entry is nearer, the scalar
// definition is asked: about once in 4000 values.
//
// Included by dynamic8_avx512.h and dynamic8_avx2.h, and by nothing else.
#pragma once

#include <cstdint>

#include "core/state/chance/stochastic.h"

namespace lowbit {

template <int kUnsigned>
struct Dynamic8Positions {
  using Tables = Dynamic8Tables<kUnsigned>;
  static constexpr int kSegments = 8, kUnsure = 8;
  static constexpr double kOne = 65536.0;
  // Two lines for each decade, and for the steps before one. from: where a segment begins.
  float inside_slope[kSegments] = {}, inside_offset[kSegments] = {};
  float after_slope[kSegments] = {}, after_offset[kSegments] = {};
  float from[kSegments] = {};

  constexpr explicit Dynamic8Positions(const Tables& t) {
    constexpr int kDecades = Tables::kDecades;
    for (int i = 0; i < kDecades; ++i) {
      const int first = i > 0 ? t.last[i - 1] + 1 : kUnsigned, last = t.last[i];
      from[i] = i > 0 ? t.magnitude[first] : 0.0f;
      line(t, first, last, inside_slope[i], inside_offset[i]);
      if (i + 1 < kDecades) {
        line(t, last, last + 1, after_slope[i], after_offset[i]);
      } else {
        after_slope[i] = inside_slope[i], after_offset[i] = inside_offset[i];
      }
    }
    from[kDecades] = t.magnitude[Tables::kTop - 1];
    line(t, Tables::kTop - 1, Tables::kTop, inside_slope[kDecades], inside_offset[kDecades]);
    after_slope[kDecades] = inside_slope[kDecades];
    after_offset[kDecades] = inside_offset[kDecades];
  }

 private:
  static constexpr void line(const Tables& t, int a, int b, float& slope, float& offset) {
    const double x = t.magnitude[a], s = kOne * (b - a) / (t.magnitude[b] - x);
    slope = static_cast<float>(s), offset = static_cast<float>(kOne * a - s * x);
  }
};

constexpr Dynamic8Positions<0> kDynamic8Positions{Dynamic8Tables<0>{}};
constexpr Dynamic8Positions<1> kDynamic8UnsignedPositions{Dynamic8Tables<1>{}};

/// The segment at the lower end of each half exponent, indexed by its low 4 bits.
template <int kUnsigned>
constexpr int segment_at(const Dynamic8Positions<kUnsigned>& p, uint32_t half_exponent) {
  int segment = 0;
  while (segment < 7 && bits_float(half_exponent << 24) >= p.from[segment + 1]) ++segment;
  return segment;
}

/// One code by the definition.
template <class Format>
LB_HD uint8_t dynamic8_by_chance(float x, float inverse, uint32_t random16) {
  return static_cast<uint8_t>(
      quantize_stochastic<Format>(BlockScale{1.0f, inverse, true}, x, random16));
}

}  // namespace lowbit
