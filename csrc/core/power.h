// x^n by squaring. Multiplications only, so every processor and C library gives the same bits,
// which pow does not guarantee.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

LB_HD constexpr double power(double x, int64_t n) {
  double result = 1.0;
  for (; n > 0; n >>= 1, x *= x) {
    if (n & 1) result *= x;
  }
  return result;
}

}  // namespace lowbit
