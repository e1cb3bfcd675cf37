// bfloat16 state, rounded to nearest (ties to even) or stochastically; 2 bytes per value.
#pragma once

#include "core/param/bfloat16.h"

namespace lowbit {

struct BFloat16State {
  static constexpr const char* kName = "bfloat16";
  static constexpr const char* kDtype = "bfloat16";
  static constexpr int kBits = 16, kBlock = 0;
  static constexpr bool kScaled = false, kSigned = true;
  using Storage = uint16_t;
  LB_HD static float dequantize(uint16_t stored) { return bfloat16_to_float(stored); }
  LB_HD static uint16_t quantize(float x) { return bfloat16_nearest(x); }
  LB_HD static uint16_t quantize(float x, uint32_t random16) {
    return bfloat16_stochastic(x, random16);
  }
};

}  // namespace lowbit
