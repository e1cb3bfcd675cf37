// Float32 parameters: what is computed is what is stored.
#pragma once

#include "core/bits.h"

namespace lowbit {

struct Float32Param {
  static constexpr const char* kName = "float32";
  static constexpr const char* kDtype = "float32";
  static constexpr bool kRandom = false;
  using Storage = float;
  LB_HD static float load(float stored) { return stored; }
  LB_HD static float store(float x, uint32_t) { return canonical(x); }
};

}  // namespace lowbit
