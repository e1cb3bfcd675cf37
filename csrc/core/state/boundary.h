// Where one code ends and the next begins, for tables that are made at compile time.
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

/// The smallest float that belongs to entry k >= 1 of an ascending map, or to one above: a tie goes
/// to the larger value, and a positive value never becomes an unsigned map's zero.
constexpr float first_of_entry(const float* value, int k, bool is_signed) {
  const bool zero = k == 1 && !is_signed && value[0] == 0.0f;
  return zero ? bits_float(1) : first_beyond(value[k - 1], value[k]);
}

}  // namespace lowbit
