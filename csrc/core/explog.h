// exp, log and powers in double, by multiplications, additions and divisions only. Every processor
// and C library therefore gives the same bits. The relative error is below 1e-15. These functions
// compute constants of a step, not elements.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

constexpr double kLn2High = 0x1.62e42fefa38p-1, kLn2Low = 0x1.ef35793c7673p-45;

/// ln x for a finite x > 0: x = m * 2^e with m around 1, ln m = 2 atanh((m - 1) / (m + 1)).
LB_HD constexpr double log_of(double x) {
  int e = 0;
  if (x < 0x1p-1022) x *= 0x1p54, e = -54;
  uint64_t bits = __builtin_bit_cast(uint64_t, x);
  e += static_cast<int>(bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull;
  double m = __builtin_bit_cast(double, bits);
  if (m > 1.4142135623730951) m *= 0.5, ++e;
  const double s = (m - 1.0) / (m + 1.0), s2 = s * s;
  double sum = 0.0;
  for (int k = 25; k >= 3; k -= 2) sum = (sum + 1.0 / k) * s2;
  return e * kLn2High + (2.0 * s + (2.0 * s * sum + e * kLn2Low));
}

/// e^x; 0 and infinity beyond double's range.
LB_HD constexpr double exp_of(double x) {
  if (x != x) return x;
  if (x > 709.0) return __builtin_bit_cast(double, 0x7ff0000000000000ull);
  if (x < -708.0) return 0.0;
  const double scaled = x * 1.4426950408889634;
  const int k = static_cast<int>(scaled < 0.0 ? scaled - 0.5 : scaled + 0.5);
  const double r = (x - k * kLn2High) - k * kLn2Low;
  double sum = 1.0;
  for (int n = 18; n >= 1; --n) sum = 1.0 + sum * r / n;
  return sum * __builtin_bit_cast(double, static_cast<uint64_t>(1023 + k) << 52);
}

/// x^y for x > 0.
LB_HD constexpr double power_of(double x, double y) { return exp_of(y * log_of(x)); }

}  // namespace lowbit
