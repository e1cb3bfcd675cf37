// float32 parameters: stored exactly as computed.
#pragma once

#include "core/bits.h"
#include "core/param/none.h"

namespace lowbit {

struct Float32Param {
  static constexpr const char* kName = "float32";
  static constexpr const char* kDtype = "float32";
  static constexpr bool kRandom = false;
  static constexpr const char* kCompensationDtype = "";
  using Storage = float;
  using Compensation = None;
  LB_HD static float load(float stored, None) { return stored; }
  LB_HD static float store(float x, uint32_t, None&) { return canonical(x); }
};

}  // namespace lowbit
