// dynamic8 on the device: the codes and values of core/state/dynamic8.h without a search, a branch
// or a double.
//
// Codes are in the order of their values, so code c begins at from[c], half way between entries
// c - 1 and c, and for any c within one of the answer
//
//     code = c - (z < from[c])
//
// c comes from the ordinal as a function of a = |z|: inside decade i it lies on the line
// slope[i] * a + offset[i], neighbouring lines cross at the power of ten between their decades, and
// slopes fall, so the ordinal is the smaller of two lines. Two neighbouring binades hold at most
// one power of ten: the exponent, halved, says which two. Rounding errors there do not matter,
// `from` decides.
#pragma once

#include "cuda/format.cuh"

namespace lowbit::cuda {

/// Two lines, and the smaller of them. One 16-byte access.
struct alignas(16) Lines {
  float slope, offset, slope_above, offset_above;
};

/// Signed (kExtra = 0) or unsigned, as in core.
template <int kExtra>
struct CodeTables {
  float value[256];  // of a code
  float from[256];   // the smallest value that belongs to the code or to one above
  Lines lines[16];   // by the low bits of exponent / 2: below the power of ten, and above
};

template <int kExtra>
constexpr CodeTables<kExtra> make_code_tables() {
  constexpr Dynamic8Tables<kExtra> core;
  CodeTables<kExtra> t{};
  constexpr int kZero = kExtra ? 0 : 127;
  for (int code = 0; code < 256; ++code) {
    t.value[code] = code < kZero ? -core.magnitude[kZero - code] : core.magnitude[code - kZero];
    t.from[code] =
        code == 0 ? -bits_float(kInfinityBits) : first_of_entry(t.value, code, kExtra == 0);
  }
  for (int e = 48; e < 64; ++e) {  // values in [2^(2 e - 127), 2^(2 e - 125))
    const float low = bits_float(static_cast<uint32_t>(e) << 24);
    int i = 0;
    for (double end = 1e-6; i + 1 < core.kDecades && low >= end; end *= 10.0) ++i;
    const bool top = i + 1 == core.kDecades;
    const float shift = kExtra ? 0.0f : 0.5f;
    t.lines[e & 15] = {core.slope[i], core.offset[i] - shift, top ? 0.0f : core.slope[i + 1],
                       (top ? static_cast<float>(core.kTop) : core.offset[i + 1]) - shift};
  }
  return t;
}

LB_TABLE CodeTables<0> kSignedTables = make_code_tables<0>();
LB_TABLE CodeTables<1> kUnsignedTables = make_code_tables<1>();

template <int kExtra>
struct Dynamic8OnDevice {
  using Tables = CodeTables<kExtra>;

  static __device__ __forceinline__ float decode(uint8_t code, const Tables& t) {
    return t.value[code];
  }

  /// z finite, at most a rounding error beyond 1.
  static __device__ __forceinline__ uint8_t encode(float z, const Tables& t) {
    constexpr float kRound =
        12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const float a = fmaxf(kExtra ? z : fabsf(z), 0x1p-30f);
    const Lines line = t.lines[(float_bits(a) >> 24) & 15];
    float c = fminf(fmaf(a, line.slope, line.offset), fmaf(a, line.slope_above, line.offset_above));
    if constexpr (kExtra == 0)
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
