// 16-bit parameters with a compensation of the same type: w is stored, c = w - W is what the last
// rounding added, and the weight that is trained is W = w - c in float32.
//
//   load   W  = w - c
//   store  w' = nearest(W'),  c' = nearest(w' - W')        (c' = 0 where w' is not finite)
//
// This is the compensated sum of arXiv:2010.06192 written as an error feedback. Theirs, for an
// update u:
//     y  = u - c
//     w' = w + y                    rounded to 16 bits
//     c' = (w' - w) - y
// With W' = W + u = w - c + u = w + y, their sum w + y is W', which store rounds, and their
// (w' - w) - y is w' - (w + y) = w' - W'. What differs is that y is not rounded to 16 bits before
// it is added, and that decay and update may be any function of W instead of an addend. w' - W' is
// exact in float32 (w' is the nearest to W'), so the only loss is the rounding of c': 8 bits of
// bfloat16 or 11 of float16 below half a step of w, and for float16 never less than 2^-24.
// An update below half a step of c is still lost; that is where the *_split16 formats go further.
#pragma once

#include <cstdint>

#include "core/param/bfloat16.h"
#include "core/param/float16.h"

namespace lowbit {

template <class Word>
struct Kahan {
  static constexpr const char* kDtype = Word::kDtype;
  static constexpr const char* kExtraDtype = Word::kDtype;
  static constexpr bool kRandom = false;
  using Storage = uint16_t;
  using Extra = uint16_t;

  /// c = +0 gives w back to the bit, -0 included.
  LB_HD static float load(uint16_t stored, uint16_t extra) {
    return Word::load(stored, None{}) - Word::load(extra, None{});
  }

  LB_HD static uint16_t store(float x, uint32_t, uint16_t& extra) {
    None none;
    const uint16_t stored = Word::store(x, 0, none);
    const float added = Word::load(stored, none) - x;
    const bool finite = magnitude_bits(Word::load(stored, none)) < kInfinityBits;
    extra = finite ? Word::store(added, 0, none) : static_cast<uint16_t>(0);
    return stored;
  }
};

struct BFloat16Kahan : Kahan<BFloat16Nearest> {
  static constexpr const char* kName = "bfloat16_kahan";
};

struct Float16Kahan : Kahan<Float16Nearest> {
  static constexpr const char* kName = "float16_kahan";
};

}  // namespace lowbit
