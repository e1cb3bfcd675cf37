// dynamic8 on the device: the codes and values of core/state/dynamic8.h without a search, a branch
// or a double.
//
// Codes are in the order of their values, so code c begins at from[c], halfway between entries
// c - 1 and c. For any c within one of the answer
//
//     code = c - (z < from[c])
//
// c comes from the ordinal as a function of a = |z|. Inside decade i it lies on the line
// slope[i] * a + offset[i]. Neighboring lines cross at the power of ten between their decades, and
// slopes decrease, so the ordinal is the smaller of two lines. Two neighboring binades contain at
// most one power of ten, so half the exponent selects the two lines. Rounding errors of the lines
// do not matter, because `from` decides.
#pragma once

#include "cuda/format.cuh"

namespace lowbit::cuda {

/// Two lines, read by one 16-byte access; the smaller result counts.
struct alignas(16) Lines {
  float slope, offset, slope_above, offset_above;
};

/// Signed (kUnsigned = 0) or unsigned, as in core.
template <int kUnsigned>
struct CodeTables {
  float value[256];  // indexed by code
  float from[256];   // the smallest value whose code is this one or higher
  // Indexed by the low bits of exponent / 2: the lines below and above the power of ten.
  Lines lines[16];
};

template <int kUnsigned>
constexpr CodeTables<kUnsigned> make_code_tables() {
  constexpr Dynamic8Tables<kUnsigned> core;
  CodeTables<kUnsigned> t{};
  constexpr int kZero = kUnsigned ? 0 : 127;
  for (int code = 0; code < 256; ++code) {
    t.value[code] = code < kZero ? -core.magnitude[kZero - code] : core.magnitude[code - kZero];
    t.from[code] =
        code == 0 ? -bits_float(kInfinityBits) : first_of_entry(t.value, code, kUnsigned == 0);
  }
  for (int e = 48; e < 64; ++e) {  // values in [2^(2 e - 127), 2^(2 e - 125))
    const float low = bits_float(static_cast<uint32_t>(e) << 24);
    int i = 0;
    for (double end = 1e-6; i + 1 < core.kDecades && low >= end; end *= 10.0) ++i;
    const bool top = i + 1 == core.kDecades;
    const float shift = kUnsigned ? 0.0f : 0.5f;
    t.lines[e & 15] = {core.slope[i], core.offset[i] - shift, top ? 0.0f : core.slope[i + 1],
                       (top ? static_cast<float>(core.kTop) : core.offset[i + 1]) - shift};
  }
  return t;
}

LB_TABLE CodeTables<0> kSignedTables = make_code_tables<0>();
LB_TABLE CodeTables<1> kUnsignedTables = make_code_tables<1>();

template <int kUnsigned>
struct Dynamic8OnDevice {
  using Tables = CodeTables<kUnsigned>;

  static __device__ __forceinline__ float dequantize(uint8_t code, const Tables& t) {
    return t.value[code];
  }

  /// z is finite and exceeds 1 by at most a rounding error.
  static __device__ __forceinline__ uint8_t quantize(float z, const Tables& t) {
    // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    constexpr float kRound = 12582912.0f;
    const float a = fmaxf(kUnsigned ? z : fabsf(z), 0x1p-30f);
    const Lines line = t.lines[(float_bits(a) >> 24) & 15];
    float c = fminf(fmaf(a, line.slope, line.offset), fmaf(a, line.slope_above, line.offset_above));
    if constexpr (kUnsigned == 0)
      c = 127.5f + bits_float(float_bits(c) | (float_bits(z) & 0x80000000u));
    const uint32_t code = float_bits(c + kRound) & 255u;
    return static_cast<uint8_t>(code - (z >= t.from[code] ? 0 : 1));
  }

  static __device__ __forceinline__ void copy(const Tables& from, Tables& to, int thread,
                                              int threads) {
    const auto* in = reinterpret_cast<const float*>(&from);
    auto* out = reinterpret_cast<float*>(&to);
    for (int i = thread; i < static_cast<int>(sizeof(Tables) / sizeof(float)); i += threads)
      out[i] = in[i];
  }
};

template <>
struct Device<Dynamic8> : Dynamic8OnDevice<0> {
  static __device__ __forceinline__ void fill(Tables& t, int thread, int threads) {
    copy(kSignedTables, t, thread, threads);
  }
};
template <>
struct Device<Dynamic8Unsigned> : Dynamic8OnDevice<1> {
  static __device__ __forceinline__ void fill(Tables& t, int thread, int threads) {
    copy(kUnsignedTables, t, thread, threads);
  }
};

}  // namespace lowbit::cuda
