// The largest magnitude of many values, in a loop that compilers vectorize.
#pragma once

#include <cstdint>

#include "core/bits.h"

namespace lowbit::cpu {

/// Magnitudes as signed integers in the same order: SSE2 compares signed integers only.
LB_HD int32_t signed_magnitude(float x) { return static_cast<int32_t>(magnitude_bits(x)); }

[[maybe_unused]] static uint32_t absmax_bits(const float* x, int n) {
  int32_t absmax = 0;
  for (int i = 0; i < n; ++i) {
    const int32_t b = signed_magnitude(x[i]);
    absmax = b > absmax ? b : absmax;
  }
  return static_cast<uint32_t>(absmax);
}

}  // namespace lowbit::cpu
