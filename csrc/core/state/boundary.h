// Boundaries between codes, for tables built at compile time.
#pragma once

#include <cstdint>

#include "core/bits.h"

namespace lowbit {

/// The smallest float at least as far from a as from b, a < b. The sum of two entries of a map is
/// exact in double.
constexpr float first_beyond(float a, float b) {
  const double middle = (static_cast<double>(a) + b) / 2;
  const float f = static_cast<float>(middle);
  return f >= middle ? f : bits_float(float_bits(f) + (f < 0.0f ? -1 : 1));
}

/// The smallest float whose code is k >= 1 or higher in an ascending map. A tie goes to the larger
/// value, and a positive value never becomes the zero of an unsigned map.
constexpr float first_of_entry(const float* value, int k, bool is_signed) {
  const bool zero = k == 1 && !is_signed && value[0] == 0.0f;
  return zero ? bits_float(1) : first_beyond(value[k - 1], value[k]);
}

}  // namespace lowbit
