// Split parameters (FlashOptim, arXiv:2602.23349): the 16-bit parameter p is the value nearest to
// the weight W. The correction bits c give the rest of W, as a signed share of half a step.
//
//   h = half a step at p = 2^(exponent(p) - mantissa bits - 1)
//   store  p = nearest(W),  c = round((W - p) / h * M), halves away from zero, |c| <= M
//   load   W = p + c / M * h                       M = 127 (8 bits) or 32767 (16 bits)
//
// The error is at most h / (2 M) plus one rounding: bfloat16 with 16 correction bits is within one
// float32 step of W, and float16 with 16 correction bits equals W. A power of two far from 1 is
// applied as two factors, so that neither overflows nor underflows float32. If p is not finite,
// c = 0.
//
// The stochastic variant rounds c up or down at random, so updates below a step of c (1 / 127 of
// half a step of p) are preserved on average.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/param/bfloat16.h"

namespace lowbit {

struct SplitBFloat16 {
  static constexpr const char* kDtype = "bfloat16";
  static constexpr int kBias = 127, kMantissa = 7;
  LB_HD static float to_float(uint16_t p) { return bfloat16_to_float(p); }
  LB_HD static uint16_t nearest(float x) { return bfloat16_nearest(x); }
};
struct SplitFloat16 {
  static constexpr const char* kDtype = "float16";
  static constexpr int kBias = 15, kMantissa = 10;
  LB_HD static float to_float(uint16_t p) { return half_to_float(p); }
  LB_HD static uint16_t nearest(float x) { return half_nearest(x); }
};

template <class Type, class Correction, bool kStochastic = false>
struct SplitParam {
  static constexpr const char* kDtype = Type::kDtype;
  static constexpr bool kRandom = kStochastic;
  using Storage = uint16_t;
  using Compensation = Correction;
  static constexpr float kMax = sizeof(Correction) == 1 ? 127.0f : 32767.0f;

  /// x * 2^n
  LB_HD static float scaled(float x, int n) {
    const int first = n >> 1;
    return x * two_to(first) * two_to(n - first);
  }
  /// Subtracts -c instead of adding c: -0 with c = 0 stays -0, and a step with lr = 0 changes no
  /// bit.
  LB_HD static float load(uint16_t stored, Correction c) {
    const float less = static_cast<float>(-static_cast<int32_t>(c)) / kMax;
    return Type::to_float(stored) - scaled(less, half_step(stored));
  }
  LB_HD static uint16_t store(float x, uint32_t random16, Correction& c) {
    const uint16_t p = Type::nearest(x);
    const float stored = Type::to_float(p);
    // A mask, not a branch: compilers move the load of random bits into a branch, and AVX2 has no
    // masked load of 16 bits.
    const uint32_t finite = all_if_negative(magnitude_bits(stored) - kInfinityBits);
    float share = bits_float(float_bits(scaled(x - stored, -half_step(p))) & finite);
    share = share > 1.0f ? 1.0f : share < -1.0f ? -1.0f : share;
    const float s = share * kMax;
    // As a signed integer: only AVX-512 converts unsigned ones.
    const float up =
        kStochastic ? (static_cast<float>(static_cast<int32_t>(random16)) + 0.5f) * 0x1p-16f : 0.5f;
    const auto rounded = static_cast<int32_t>(bits_float(magnitude_bits(s)) + up);
    c = static_cast<Correction>(s < 0.0f ? -rounded : rounded);
    return p;
  }

 private:
  LB_HD static float two_to(int n) { return bits_float(static_cast<uint32_t>(n + 127) << 23); }
  /// log2 of h at p. Zero and subnormals use the step of the smallest normal values.
  LB_HD static int half_step(uint16_t p) {
    const int field = (p & 0x7fff) >> Type::kMantissa;
    return (field > 0 ? field : 1) - Type::kBias - Type::kMantissa - 1;
  }
};

struct BFloat16Split8 : SplitParam<SplitBFloat16, int8_t> {
  static constexpr const char *kName = "bfloat16_split8", *kCompensationDtype = "int8";
};
// Stored as two bytes per value: gloo and NCCL cannot move 16-bit integers.
struct BFloat16Split16 : SplitParam<SplitBFloat16, int16_t> {
  static constexpr const char *kName = "bfloat16_split16", *kCompensationDtype = "uint8";
};
struct BFloat16Split8Stochastic : SplitParam<SplitBFloat16, int8_t, true> {
  static constexpr const char *kName = "bfloat16_split8_stochastic", *kCompensationDtype = "int8";
};
struct Float16Split8 : SplitParam<SplitFloat16, int8_t> {
  static constexpr const char *kName = "float16_split8", *kCompensationDtype = "int8";
};
struct Float16Split16 : SplitParam<SplitFloat16, int16_t> {
  static constexpr const char *kName = "float16_split16", *kCompensationDtype = "uint8";
};

}  // namespace lowbit
