// The standard normal value of a uniform 32-bit word, by the inverse of the distribution (M.
// Wichura's algorithm AS 241, Applied Statistics 37, 1988: relative error about 1e-16), in single
// double operations. Monotone in the word and odd about the middle:
//
//   u = (word + 1/2) / 2^32,   q = u - 1/2
//   |q| <= 0.425:   q * A(r) / B(r)                 r = 0.425^2 - q^2
//   otherwise:      sign(q) * C(r) / D(r)           r = sqrt(-log(min(u, 1 - u))) - 1.6
//
// The algorithm's third branch is for r > 5, that is, u below e^-25. It is not needed: the smallest
// u is 2^-33.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

/// An upper bound of normal(), whose value for the last word is 6.3380.
constexpr double kNormalBound = 6.34;

/// Natural logarithm of a positive normal number, to about 2e-16 of the result's scale: with x =
/// 2^e * m, m in [0.75, 1.5),  log x = e log 2 + 2 atanh s,  s = (m - 1) / (m + 1), |s| <= 1/5.
LB_HD double natural_log(double x) {
  uint64_t bits = __builtin_bit_cast(uint64_t, x);
  int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull;
  double m = __builtin_bit_cast(double, bits);
  if (m >= 1.5) {
    m = m * 0.5;
    exponent += 1;
  }
  const double s = (m - 1.0) / (m + 1.0), t = s * s;
  double sum = 0.0;
  for (int k = 23; k >= 1; k -= 2) sum = sum * t + 1.0 / k;
  return static_cast<double>(exponent) * 0.6931471805599453 + 2.0 * s * sum;
}

namespace normal_coefficients {
LB_HD double numerator_centre(double r) {
  double y = 2.5090809287301226727e3;
  y = y * r + 3.3430575583588128105e4;
  y = y * r + 6.7265770927008700853e4;
  y = y * r + 4.5921953931549871457e4;
  y = y * r + 1.3731693765509461125e4;
  y = y * r + 1.9715909503065514427e3;
  y = y * r + 1.3314166789178437745e2;
  return y * r + 3.3871328727963666080;
}
LB_HD double denominator_centre(double r) {
  double y = 5.2264952788528545610e3;
  y = y * r + 2.8729085735721942674e4;
  y = y * r + 3.9307895800092710610e4;
  y = y * r + 2.1213794301586595867e4;
  y = y * r + 5.3941960214247511077e3;
  y = y * r + 6.8718700749205790830e2;
  y = y * r + 4.2313330701600911252e1;
  return y * r + 1.0;
}
LB_HD double numerator_tail(double r) {
  double y = 7.7454501427834140764e-4;
  y = y * r + 2.27238449892691845833e-2;
  y = y * r + 2.41780725177450611770e-1;
  y = y * r + 1.27045825245236838258;
  y = y * r + 3.64784832476320460504;
  y = y * r + 5.76949722146069140550;
  y = y * r + 4.63033784615654529590;
  return y * r + 1.42343711074968357734;
}
LB_HD double denominator_tail(double r) {
  double y = 1.05075007164441684324e-9;
  y = y * r + 5.47593808499534494600e-4;
  y = y * r + 1.51986665636164571966e-2;
  y = y * r + 1.48103976427480074590e-1;
  y = y * r + 6.89767334985100004550e-1;
  y = y * r + 1.67638483018380384940;
  y = y * r + 2.05319162663775882187;
  return y * r + 1.0;
}
}  // namespace normal_coefficients

LB_HD double normal(uint32_t word) {
  const double u = (static_cast<double>(word) + 0.5) * 0x1p-32, q = u - 0.5;
  if (__builtin_fabs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q *
           (normal_coefficients::numerator_centre(r) / normal_coefficients::denominator_centre(r));
  }
  const double tail = q < 0.0 ? u : 1.0 - u;
  const double r = __builtin_sqrt(-natural_log(tail)) - 1.6;
  const double y =
      normal_coefficients::numerator_tail(r) / normal_coefficients::denominator_tail(r);
  return q < 0.0 ? -y : y;
}

}  // namespace lowbit
