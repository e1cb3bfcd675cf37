// float16 parameters without a master copy: decay and update are computed in float32, then rounded
// once.
//
//   nearest     ties to even; beyond the largest finite value infinity, as in torch
//   stochastic  to one of the two neighbors with a probability that preserves the mean; a finite
//               value stays finite
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/param/none.h"

namespace lowbit {

/// Normal values drop 13 bits after adding as many random ones. Below 2^-14 values lie 2^-24 apart.
LB_HD uint16_t half_stochastic(float x, uint32_t random16) {
  const uint32_t m = magnitude_bits(x);
  const uint32_t sign = (float_bits(x) >> 16) & 0x8000u;
  uint32_t h;
  if (m < 0x38800000u) {  // 2^-14
    const float steps = bits_float(m) * 0x1p24f;
    h = static_cast<uint32_t>(steps);
    const float left = (steps - static_cast<float>(h)) * 65536.0f;
    h += static_cast<float>(random16) + 0.5f < left;
  } else {
    h = (m + (random16 >> 3) - (112u << 23)) >> 13;
    if (h > 0x7bffu) h = 0x7bffu;  // finite stays finite
  }
  if (m >= kInfinityBits) h = 0x7c00u;
  return static_cast<uint16_t>(is_nan_bits(m) ? 0x7e00u : h | sign);
}

struct Float16Nearest {
  static constexpr const char* kName = "float16";
  static constexpr const char* kDtype = "float16";
  static constexpr bool kRandom = false;
  static constexpr const char* kCompensationDtype = "";
  using Storage = uint16_t;
  using Compensation = None;
  LB_HD static float load(uint16_t stored, None) { return half_to_float(stored); }
  LB_HD static uint16_t store(float x, uint32_t, None&) { return half_nearest(x); }
};

struct Float16Stochastic {
  static constexpr const char* kName = "float16_stochastic";
  static constexpr const char* kDtype = "float16";
  static constexpr bool kRandom = true;
  static constexpr const char* kCompensationDtype = "";
  using Storage = uint16_t;
  using Compensation = None;
  LB_HD static float load(uint16_t stored, None) { return half_to_float(stored); }
  LB_HD static uint16_t store(float x, uint32_t random16, None&) {
    return half_stochastic(x, random16);
  }
};

}  // namespace lowbit

#if !defined(__CUDACC__) && defined(__AVX2__)
#include "core/param/float16_block.h"
#endif
