// float32 state, stored unchanged.
#pragma once

#include "core/bits.h"

namespace lowbit {

struct Float32State {
  static constexpr const char* kName = "float32";
  static constexpr const char* kDtype = "float32";
  static constexpr int kBits = 32, kBlock = 0;
  static constexpr bool kScaled = false, kSigned = true;
  using Storage = float;
  LB_HD static float dequantize(float stored) { return stored; }
  LB_HD static float quantize(float x) { return canonical(x); }
};

}  // namespace lowbit
