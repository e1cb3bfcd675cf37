// log2 and 2^y in float32 operations that are each rounded once. Every processor and compiler
// therefore gives the same bits, which the functions of C libraries do not guarantee.
//
// Both split off an integer exactly and approximate the rest by a polynomial with float
// coefficients, fitted to minimize the maximum relative error. The error of log2 is below 5e-8 for
// the part in [-1/2, 1/2]; the relative error of 2^y is below 1.5e-7. Powers of two are exact in
// both directions, including subnormals. Without tables and branches, compilers vectorize the
// loops.
#pragma once

#include <cstdint>

#include "core/bits.h"

namespace lowbit {

/// log2(x) = whole + part, with an integer `whole` and `part` in [-1/2, 1/2]. Their sum in one
/// float would lose up to 4e-6 of it.
struct Log2 {
  float whole, part;
};

/// x >= 2^-126, finite.
LB_HD constexpr Log2 log2_normal(float x) {
  constexpr uint32_t kRootHalf = 0x3f3504f3u;  // mantissas lie in [sqrt(1/2), sqrt(2))
  const uint32_t bits = float_bits(x);
  const int32_t e = static_cast<int32_t>(bits - kRootHalf) >> 23;
  const float f = bits_float(bits - (static_cast<uint32_t>(e) << 23)) - 1.0f;
  float p = -0x1.a561e0p-4f;
  p = p * f + 0x1.786132p-3f;
  p = p * f + -0x1.8bc6aap-3f;
  p = p * f + 0x1.a47fd6p-3f;
  p = p * f + -0x1.ea4d00p-3f;
  p = p * f + 0x1.276cb6p-2f;
  p = p * f + -0x1.715c78p-2f;
  p = p * f + 0x1.ec712ap-2f;
  p = p * f + -0x1.71546ep-1f;
  p = p * f + 0x1.715476p+0f;
  return {static_cast<float>(e), p * f};
}

/// x > 0, finite.
LB_HD constexpr Log2 log2_parts(float x) {
  const bool subnormal = x < bits_float(0x00800000u);
  const Log2 l = log2_normal(subnormal ? x * 16777216.0f : x);
  return {subnormal ? l.whole - 24.0f : l.whole, l.part};
}

LB_HD constexpr float binary_log(float x) {
  const Log2 l = log2_parts(x);
  return l.whole + l.part;
}

/// The integer nearest to x, ties to even, for |x| < 2^22.
LB_HD constexpr float nearest_integer(float x) {
  constexpr float kPush = 12582912.0f;  // 1.5 * 2^23: from here on every float is an integer
  return (x + kPush) - kPush;
}
LB_HD constexpr int32_t to_integer(float whole) {
  constexpr float kPush = 12582912.0f;
  return static_cast<int32_t>(float_bits(whole + kPush) - float_bits(kPush));
}

/// 2^(y + whole), with an integer `whole` and y + whole in [-250, 250]. NaN gives NaN.
LB_HD constexpr float binary_exp(float y, float whole) {
  const float n = nearest_integer(y), f = y - n;
  float p = 0x1.442d42p-13f;
  p = p * f + 0x1.5f17fap-10f;
  p = p * f + 0x1.3b2a42p-7f;
  p = p * f + 0x1.c6af68p-5f;
  p = p * f + 0x1.ebfbe0p-3f;
  p = p * f + 0x1.62e430p-1f;
  // Two factors, so that a subnormal result is rounded once and a large one does not overflow
  // early.
  const int32_t e = to_integer(n + whole), half = e >> 1;
  const float low = bits_float(static_cast<uint32_t>(half + 127) << 23);
  const float high = bits_float(static_cast<uint32_t>(e - half + 127) << 23);
  return (1.0f + p * f) * low * high;
}

}  // namespace lowbit
