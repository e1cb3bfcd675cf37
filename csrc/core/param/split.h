// Split parameters (FlashOptim, arXiv:2602.23349): beside the 16-bit parameter p, which is the
// nearest to the weight W, the signed share c of half a step by which W lies beyond it.
//
//   h = half a step at p = 2^(exponent(p) - mantissa bits - 1)
//   store  p = nearest(W),  c = round((W - p) / h * M), halves away from zero, |c| <= M
//   load   W = p + c / M * h                       M = 127 (8 bits) or 32767 (16 bits)
//
// Error at most h / (2 M) and a rounding: bfloat16 with 16 bits is within one float32 step of W,
// float16 with 16 bits is W. A power of two far from 1 is applied in two factors, so that neither
// leaves float32. Where p is not finite, c = 0.
//
// Stochastic: c is rounded up or down by chance instead, so that updates below a step of c, 1 / 127
// of half a step of p, are kept on average.
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
  using Extra = Correction;
  static constexpr float kMost = sizeof(Correction) == 1 ? 127.0f : 32767.0f;

  /// x * 2^n
  LB_HD static float scaled(float x, int n) {
    const int first = n >> 1;
    return x * two_to(first) * two_to(n - first);
  }
  /// Less -c, not plus c: -0 with c = 0 stays -0, and a step with lr = 0 leaves every bit as it is.
  LB_HD static float load(uint16_t stored, Correction c) {
    const float less = static_cast<float>(-static_cast<int32_t>(c)) / kMost;
    return Type::to_float(stored) - scaled(less, half_step(stored));
  }
  LB_HD static uint16_t store(float x, uint32_t random16, Correction& c) {
    const uint16_t p = Type::nearest(x);
    const float stored = Type::to_float(p);
    if (magnitude_bits(stored) >= kInfinityBits) {
      c = 0;
      return p;
    }
    float share = scaled(x - stored, -half_step(p));
    share = share > 1.0f ? 1.0f : share < -1.0f ? -1.0f : share;
    const float s = share * kMost;
    const float up = kStochastic ? (static_cast<float>(random16) + 0.5f) * 0x1p-16f : 0.5f;
    const auto rounded = static_cast<int32_t>(bits_float(magnitude_bits(s)) + up);
    c = static_cast<Correction>(s < 0.0f ? -rounded : rounded);
    return p;
  }

 private:
  LB_HD static float two_to(int n) { return bits_float(static_cast<uint32_t>(n + 127) << 23); }
  /// log2 of h at p; zero and subnormals share the step of the smallest normal values.
  LB_HD static int half_step(uint16_t p) {
    const int field = (p & 0x7fff) >> Type::kMantissa;
    return (field > 0 ? field : 1) - Type::kBias - Type::kMantissa - 1;
  }
};

struct BFloat16Split8 : SplitParam<SplitBFloat16, int8_t> {
  static constexpr const char *kName = "bfloat16_split8", *kExtraDtype = "int8";
};
// Two bytes to a value: gloo and NCCL move no 16-bit integers.
struct BFloat16Split16 : SplitParam<SplitBFloat16, int16_t> {
  static constexpr const char *kName = "bfloat16_split16", *kExtraDtype = "uint8";
};
struct BFloat16Split8Stochastic : SplitParam<SplitBFloat16, int8_t, true> {
  static constexpr const char *kName = "bfloat16_split8_stochastic", *kExtraDtype = "int8";
};
struct Float16Split8 : SplitParam<SplitFloat16, int8_t> {
  static constexpr const char *kName = "float16_split8", *kExtraDtype = "int8";
};
struct Float16Split16 : SplitParam<SplitFloat16, int16_t> {
  static constexpr const char *kName = "float16_split16", *kExtraDtype = "uint8";
};

}  // namespace lowbit
