// bfloat16 parameters without a master copy: decay and update are computed in float32, then rounded
// once.
//
//   nearest     ties to even
//   stochastic  (bits + r) >> 16 with r uniform in [0, 2^16): up with probability
//               (low 16 bits) / 2^16, so the mean is exact and an update smaller than half a step
//               is kept on average instead of being lost (arXiv:2010.06192)
//
// Both keep infinities, write every NaN as 0x7fc0, and leave values that are exact in bfloat16
// unchanged. Stochastic rounding never turns a finite value into infinity: it stops at the largest
// finite value.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/param/none.h"

namespace lowbit {

LB_HD float bfloat16_to_float(uint16_t b) { return bits_float(static_cast<uint32_t>(b) << 16); }

// Rounded values are the upper halves of words, and selections are masks over words. g++ would
// otherwise compare magnitudes as unsigned numbers, which SSE2 cannot, and select among halves,
// which is slower.
LB_HD uint32_t bfloat16_unless_nan(uint32_t bits, uint32_t rounded) {
  const uint32_t nan = all_if_negative(kInfinityBits - (bits & 0x7fffffffu));
  return (rounded & ~nan) | (kCanonicalNan & nan);
}

LB_HD uint32_t bfloat16_nearest_word(float x) {
  const uint32_t b = float_bits(x);
  return bfloat16_unless_nan(b, b + 0x7fffu + ((b >> 16) & 1u));
}
LB_HD uint16_t bfloat16_nearest(float x) {
  return static_cast<uint16_t>(bfloat16_nearest_word(x) >> 16);
}

LB_HD uint16_t bfloat16_stochastic(float x, uint32_t random16) {
  const uint32_t b = float_bits(x);
  // Keeps infinity and any value that a carry would make infinite. No carry reaches the sign.
  const uint32_t carries = all_if_negative((b & 0x7fffffffu) - 0x7f7f0000u);
  return static_cast<uint16_t>(bfloat16_unless_nan(b, b + (random16 & carries)) >> 16);
}

struct BFloat16Nearest {
  static constexpr const char* kName = "bfloat16";
  static constexpr const char* kDtype = "bfloat16";
  static constexpr bool kRandom = false;
  static constexpr const char* kCompensationDtype = "";
  using Storage = uint16_t;
  using Compensation = None;
  LB_HD static float load(uint16_t stored, None) { return bfloat16_to_float(stored); }
  LB_HD static uint16_t store(float x, uint32_t, None&) { return bfloat16_nearest(x); }
};

struct BFloat16Stochastic {
  static constexpr const char* kName = "bfloat16_stochastic";
  static constexpr const char* kDtype = "bfloat16";
  static constexpr bool kRandom = true;
  static constexpr const char* kCompensationDtype = "";
  using Storage = uint16_t;
  using Compensation = None;
  LB_HD static float load(uint16_t stored, None) { return bfloat16_to_float(stored); }
  LB_HD static uint16_t store(float x, uint32_t random16, None&) {
    return bfloat16_stochastic(x, random16);
  }
};

}  // namespace lowbit

#if defined(__CUDACC__)
#elif defined(__AVX512F__) && defined(__AVX512BW__)
#include "core/param/bfloat16_avx512.h"
#elif defined(__AVX2__)
#include "core/param/bfloat16_avx2.h"
#endif
