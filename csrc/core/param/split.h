// 16-bit parameters with an integer correction: p is the weight rounded to nearest, c says where
// within half a step of p the float32 weight lies. The numbers are FlashOptim's (arXiv:2602.23349),
// so its weights and corrections can be taken over.
//
//   h      half the distance from p to the next value away from zero: 2^(e(p) - fraction bits - 1),
//          where zero and subnormals have the exponent of the smallest normal number
//   load   W = p + (c / M) * h                              M = 127 or 32767
//   store  p = nearest(W),  c = round(clamp((W - p) / h, -1, 1) * M), halves away from zero
//
// h may be as small as 2^-134 and 1/h beyond float32, so both are applied as two factors; products
// with a power of two are exact until the last one, whose rounding at a subnormal result is the
// only one.
//
// Two things differ from FlashOptim, neither visible in a finite weight other than -0: c is 0
// beside an infinity or a NaN (theirs is -127), and c = 0 gives p back to the bit, -0 included
// (theirs gives +0). Where |c| = M the weight is the midpoint of two values and may be stored as
// the other of the two with c of the other sign next time: the same weight in other bytes.
//
// Error of W (float32 steps over [1, 2)): bfloat16 + 8: 258, bfloat16 + 16: 1, float16 + 8: 32,
// float16 + 16: none.
#pragma once

#include <cstdint>

#include "core/param/bfloat16.h"
#include "core/param/float16.h"

namespace lowbit {

template <class Word, class Integer>
struct Split {
  static constexpr const char* kDtype = Word::kDtype;
  static constexpr const char* kExtraDtype = sizeof(Integer) == 1 ? "int8" : "int16";
  static constexpr bool kRandom = false;
  static constexpr float kMost = sizeof(Integer) == 1 ? 127.0f : 32767.0f;
  using Storage = uint16_t;
  using Extra = Integer;

  /// log2(h).
  LB_HD static int half_step(uint16_t stored) {
    const int field = (stored & 0x7fff) >> Word::kFraction;
    return (field > 1 ? field : 1) - Word::kBias - Word::kFraction - 1;
  }

  /// x * 2^n for |n| <= 252, rounded once.
  LB_HD static float times_power(float x, int n) {
    const int first = n >> 1, second = n - first;
    return x * bits_float(static_cast<uint32_t>(127 + first) << 23) *
           bits_float(static_cast<uint32_t>(127 + second) << 23);
  }

  /// Subtracts -c so that c = 0 leaves the sign of zero alone.
  LB_HD static float load(uint16_t stored, Integer extra) {
    const float less = static_cast<float>(-static_cast<int>(extra)) / kMost;
    return Word::load(stored, None{}) - times_power(less, half_step(stored));
  }

  LB_HD static uint16_t store(float x, uint32_t, Integer& extra) {
    None none;
    const uint16_t stored = Word::store(x, 0, none);
    const float p = Word::load(stored, none);
    const bool finite = magnitude_bits(p) < kInfinityBits;
    const float rest = finite ? x - p : 0.0f;  // exact: p is the nearest to x
    float share = times_power(rest, -half_step(stored));
    share = share > 1.0f ? 1.0f : share < -1.0f ? -1.0f : share;
    const float scaled = share * kMost;
    const int steps = static_cast<int>(bits_float(magnitude_bits(scaled)) + 0.5f);
    extra = static_cast<Integer>(scaled < 0.0f ? -steps : steps);
    return stored;
  }
};

struct BFloat16Split8 : Split<BFloat16Nearest, int8_t> {
  static constexpr const char* kName = "bfloat16_split8";
};

struct BFloat16Split16 : Split<BFloat16Nearest, int16_t> {
  static constexpr const char* kName = "bfloat16_split16";
};

struct Float16Split8 : Split<Float16Nearest, int8_t> {
  static constexpr const char* kName = "float16_split8";
};

struct Float16Split16 : Split<Float16Nearest, int16_t> {
  static constexpr const char* kName = "float16_split16";
};

}  // namespace lowbit
