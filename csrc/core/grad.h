// Gradient formats. A step reads gradients; only means of gradients (core/mean_bins.h) are written.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/param/bfloat16.h"
#include "core/types.h"

namespace lowbit {

struct Float32Grad {
  static constexpr const char* kDtype = "float32";
  using Storage = float;
  LB_HD static float load(float stored) { return stored; }
  LB_HD static float nearest(float x) { return x; }
};

struct BFloat16Grad {
  static constexpr const char* kDtype = "bfloat16";
  using Storage = uint16_t;
  LB_HD static float load(uint16_t stored) { return bfloat16_to_float(stored); }
  LB_HD static uint16_t nearest(float x) { return bfloat16_nearest(x); }
};

struct Float16Grad {
  static constexpr const char* kDtype = "float16";
  using Storage = uint16_t;
  LB_HD static float load(uint16_t stored) { return half_to_float(stored); }
  LB_HD static uint16_t nearest(float x) { return half_nearest(x); }
};

using GradFormats = Types<Float32Grad, BFloat16Grad, Float16Grad>;

}  // namespace lowbit
