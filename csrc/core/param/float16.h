// float16 parameters without a master copy: decay and update are applied in float32, then rounded
// once (core/half.h).
//
//   nearest     as torch casts: overflow is infinity
//   stochastic  between the two neighbours, so the mean is exact and an update smaller than half a
//               step is kept on average instead of being lost (arXiv:2010.06192); overflow stays at
//               the largest finite value
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/param/none.h"

namespace lowbit {

struct Float16Nearest {
  static constexpr const char* kName = "float16";
  static constexpr const char* kDtype = "float16";
  static constexpr const char* kExtraDtype = "";
  static constexpr bool kRandom = false;
  static constexpr int kFraction = 10, kBias = 15;
  using Storage = uint16_t;
  using Extra = None;
  LB_HD static float load(uint16_t stored, None) { return half_to_float(stored); }
  LB_HD static uint16_t store(float x, uint32_t, None&) { return half_nearest(x); }
};

struct Float16Stochastic {
  static constexpr const char* kName = "float16_stochastic";
  static constexpr const char* kDtype = "float16";
  static constexpr const char* kExtraDtype = "";
  static constexpr bool kRandom = true;
  using Storage = uint16_t;
  using Extra = None;
  LB_HD static float load(uint16_t stored, None) { return half_to_float(stored); }
  LB_HD static uint16_t store(float x, uint32_t random16, None&) {
    return half_stochastic(x, random16);
  }
};

}  // namespace lowbit
