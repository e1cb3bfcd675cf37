// The orthogonalization of Muon (K. Jordan, 2024): Newton-Schulz steps that drive all singular
// values of a matrix to about 1.
//
//   X = U / max(norm * factor, eps)     norm = |U| (Frobenius); transposed first if it has more
//                                       rows than columns
//   for each (a, b, c):
//     A = X X^T,   B = b A + c A A,   X = a X + B X
//
// U, X, A and B are bfloat16, and so are the norm and the divisor. A product has one float32 chain
// for each output, s = 0 and then s = s + x_k y_k with k ascending. Two bfloat16 numbers have an
// exact product in float32, so a fused multiply-add gives the same chain, and it does not matter
// who computes which output. alpha s + beta self is three float32 operations and one rounding to
// bfloat16.
//
// Magnitudes below kSmallest become 0 where X, A and B are rounded. No product or sum of others is
// subnormal, so a processor that flushes subnormal numbers gives the same bits.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/exact_sum.h"
#include "core/macros.h"
#include "core/param/bfloat16.h"

namespace lowbit {

constexpr uint32_t kSmallestBits = (127u - 55u) << 23;  // 2^-55

/// The bfloat16 of a value of X, A or B.
LB_HD uint16_t orthogonal_value(float x) {
  const uint32_t small = all_if_negative(magnitude_bits(x) - kSmallestBits);
  return static_cast<uint16_t>((bfloat16_nearest_word(x) & ~small) >> 16);
}

/// An output of a product from its chain, the other operand's value there, and the factors of both.
LB_HD uint16_t product_value(float sum, uint16_t self, float alpha, float beta) {
  return orthogonal_value(beta * bfloat16_to_float(self) + alpha * sum);
}

/// The exponent e by which the norm is measured: the squares of x 2^-e neither overflow nor, where
/// they matter, underflow. absmax: the largest magnitude as bits, finite.
LB_HD int norm_exponent(uint32_t absmax) {
  const int exponent = static_cast<int>(absmax >> 23) - 127;
  return exponent < -126 ? -126 : exponent;
}

/// What X is divided by. squares: the exact sum of the squares of U 2^-exponent.
LB_HD float norm_divisor(double squares, int exponent, double factor, double eps) {
  const double norm = __builtin_sqrt(squares) * power_of_two(exponent);
  const float rounded = bfloat16_to_float(bfloat16_nearest(static_cast<float>(norm)));
  const float scaled = bfloat16_to_float(bfloat16_nearest(rounded * static_cast<float>(factor)));
  const float least = bfloat16_to_float(bfloat16_nearest(static_cast<float>(eps)));
  return scaled < least ? least : scaled;  // a NaN stays
}

}  // namespace lowbit
