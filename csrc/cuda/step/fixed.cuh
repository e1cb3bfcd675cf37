// How a fixed kernel reads and writes the 8 neighboring values of a lane in one state format.
//
//   fill         makes the format's tables in shared memory
//   dequantize   8 codes to values, which the scale then multiplies
//   Encoder      made of the largest magnitude of a block; quantizes 8 values
#pragma once

#include "cuda/step/cells.cuh"
#include "cuda/warp.cuh"

namespace lowbit::cuda {

constexpr int kEach = kTile / kLanes;  // values per lane

template <class F>
using StatePack = Pack8<typename F::Storage, F::kBits>;

/// Core's functions, one value at a time.
template <class F>
struct Fixed {
  struct Tables {};
  static __device__ __forceinline__ void fill(Tables&, int, int) {}
  static __device__ __forceinline__ void dequantize(const StatePack<F>& pack, const Tables&,
                                                    float (&z)[kEach]) {
    for (int e = 0; e < kEach; ++e) z[e] = F::dequantize(pack.get(e));
  }
  struct Encoder {
    static_assert(!F::kScaled);
    __device__ __forceinline__ explicit Encoder(uint32_t) {}
    __device__ __forceinline__ void quantize(const float (&x)[kEach], const Tables&,
                                             StatePack<F>& pack) const {
      for (int e = 0; e < kEach; ++e)
        pack.set(e, static_cast<typename F::Storage>(F::quantize(x[e])));
    }
  };
};

/// 8-bit codes as values of a table.
template <class Table>
__device__ __forceinline__ void look_up(const uint32_t* words, const Table& table,
                                        float (&z)[kEach]) {
  for (int e = 0; e < kEach; ++e) {
    z[e] = *reinterpret_cast<const float*>(reinterpret_cast<const char*>(table) +
                                           byte_times_4(words[e / 4], e % 4));
  }
}

// ---- codebooks of which 1 is the largest value ----

template <class F>
concept HasCells =
    F::kScaled && __is_same(typename F::Scale, BlockScale) && (F::kBits == 8 || F::kBits == 4);

template <class F>
  requires HasCells<F>
struct Fixed<F> {
  using Tables = CellTables<F>;
  static __device__ __forceinline__ void fill(Tables& t, int thread, int threads) {
    CellCode<F>::fill(t, thread, threads);
  }
  static __device__ __forceinline__ void dequantize(const StatePack<F>& pack, const Tables& t,
                                                    float (&z)[kEach]) {
    if constexpr (F::kBits == 8) {
      look_up(pack.word, t.value, z);
    } else {
      const uint32_t even = pack.word[0] & 0x0f0f0f0fu, odd = pack.word[0] >> 4 & 0x0f0f0f0fu;
      const uint32_t bytes[2] = {permute<0x5140>(even, odd), permute<0x7362>(even, odd)};
      look_up(bytes, t.value, z);
    }
  }

  struct Encoder {
    float scale, inverse;
    uint32_t coded;  // ones, or zeros: every code is that of zero
    __device__ __forceinline__ explicit Encoder(uint32_t absmax) {
      if (absmax - float_bits(0x1p-100f) < float_bits(0x1p100f) - float_bits(0x1p-100f)) {
        scale = bits_float(absmax), inverse = reciprocal_in_range(scale), coded = ~0u;
      } else {  // rare
        const BlockScale s = BlockScale::of(absmax, kNoMin);
        scale = s.scale, inverse = s.inverse, coded = s.coded ? ~0u : 0u;
      }
    }
    __device__ __forceinline__ void write(float* to) const { *to = scale; }
    __device__ __forceinline__ void quantize(const float (&x)[kEach], const Tables& t,
                                             StatePack<F>& pack) const {
      uint32_t bytes[2];
      float z[kEach];
      for (int e = 0; e < kEach; ++e) z[e] = x[e] * (CellsOf<F>::kMirrored ? -inverse : inverse);
      CellCode<F>::quantize(z, t, bytes);
      constexpr uint32_t kZeros = F::kZeroCode * (F::kBits == 8 ? 0x01010101u : 0x11111111u);
      if constexpr (F::kBits == 8) {
        for (int i = 0; i < 2; ++i) pack.word[i] = (bytes[i] & coded) | (kZeros & ~coded);
      } else {
        const uint32_t low = bytes[0] | bytes[0] >> 4, high = bytes[1] | bytes[1] >> 4;
        pack.word[0] = (permute<0x6420>(low, high) & coded) | (kZeros & ~coded);
      }
    }
  };
};

// ---- 8-bit floats ----

template <class F>
  requires kIsFloat<F>
struct Fixed<F> {
  using Tables = CellTables<F>;
  static __device__ __forceinline__ void fill(Tables& t, int thread, int threads) {
    CellCode<F>::fill(t, thread, threads);
  }
  static __device__ __forceinline__ void dequantize(const StatePack<F>& pack, const Tables& t,
                                                    float (&z)[kEach]) {
    look_up(pack.word, t.value, z);
  }

  struct Encoder {
    typename F::Scale scale;
    float inverse;
    bool usual;
    __device__ __forceinline__ explicit Encoder(uint32_t absmax)
        : scale(F::Scale::of(absmax, kNoMin)) {
      usual =
          float_bits(scale.scale) - float_bits(0x1p-80f) <= float_bits(1.0f) - float_bits(0x1p-80f);
      inverse = reciprocal_in_range(usual ? scale.scale : 1.0f);
    }
    __device__ __forceinline__ void write(float* to) const { scale.write(to); }
    __device__ __forceinline__ void quantize(const float (&x)[kEach], const Tables& t,
                                             StatePack<F>& pack) const {
      float z[kEach];
      if (usual) {
        // Below 2^-90 only the sign of z counts, and z keeps it.
        for (int e = 0; e < kEach; ++e) z[e] = divide_in_range(x[e], scale.scale, inverse);
      } else {
        for (int e = 0; e < kEach; ++e) z[e] = scale.coded ? scale.to_z(x[e]) : 0.0f;
      }
      CellCode<F>::quantize(z, t, pack.word);
    }
  };
};

/// 8-bit codes, each in the lowest byte of a word; those of zero where `coded` is zeros, not ones.
template <class F>
__device__ __forceinline__ void pack_codes(const uint32_t (&code)[kEach], uint32_t coded,
                                           StatePack<F>& pack) {
  constexpr uint32_t kZeros = F::kZeroCode * 0x01010101u;
  for (int i = 0; i < 2; ++i) pack.word[i] = (low_bytes(code + 4 * i) & coded) | (kZeros & ~coded);
}

// ---- companded codes ----

template <class F>
concept IsCompanded = __is_same(F, Companded8) || __is_same(F, Companded8Unsigned);

// Core's own divisions and roots: their rounded results need not ascend with the value, so neither
// cells nor boundaries between codes would have the same bits.
template <class F>
  requires IsCompanded<F>
struct Fixed<F> {
  struct Tables {
    float value[1 << F::kBits];
  };
  static __device__ __forceinline__ void fill(Tables& t, int thread, int threads) {
    LB_UNROLL(1)
    for (int i = thread; i < 1 << F::kBits; i += threads)
      t.value[i] = F::dequantize(static_cast<uint32_t>(i));
  }
  static __device__ __forceinline__ void dequantize(const StatePack<F>& pack, const Tables& t,
                                                    float (&z)[kEach]) {
    look_up(pack.word, t.value, z);
  }

  struct Encoder {
    static constexpr bool kRoot = !F::kSigned;
    static constexpr float kSmallest = 0x1p-100f;  // of which sqrt_in_range takes the root
    float scale, divisor, inverse;
    uint32_t coded;  // ones, or zeros: every code is that of zero
    __device__ __forceinline__ explicit Encoder(uint32_t absmax) {
      constexpr uint32_t kFrom = kRoot ? float_bits(kSmallest) : 1;
      if (absmax - kFrom < kInfinityBits - kFrom) {
        const float a = kRoot ? sqrt_in_range(bits_float(absmax)) : bits_float(absmax);
        const float half = half_rounded(a);
        scale = fminf(fmaxf(half, 0x1p-24f), 65504.0f);
        divisor = half == scale ? a : scale, coded = ~0u;
      } else {  // rare
        const auto s = F::Scale::of(absmax, kNoMin);
        scale = s.scale, divisor = s.divisor, coded = s.coded ? ~0u : 0u;
      }
      inverse = reciprocal_in_range(divisor);  // of 2^-25 to 65520
    }
    __device__ __forceinline__ void write(float* to) const { *to = scale; }

    /// A code in the lowest byte. Below the range of the divisions every value has the code of
    /// zero, or of the smallest step.
    __device__ __forceinline__ uint32_t one(float x) const {
      constexpr float kBase = 0x1.8p23f;
      if constexpr (kRoot) {
        const float z = divide_in_range(sqrt_in_range(fmaxf(x, kSmallest)), divisor, inverse);
        const uint32_t code = floor_bits(fminf(fmaxf(z * 255.0f + 0.5f, 1.0f), 255.0f), kBase);
        return x > 0.0f ? code : 0;
      } else {
        const float z = divide_in_range(x, divisor, inverse), below = 1.0f + fabsf(z);
        const float t = divide_in_range(2.0f * z, below, reciprocal_in_range(below));
        return floor_bits(fminf(fmaxf(t * 127.0f + 0.5f, -127.0f), 127.0f), kBase + 127.0f);
      }
    }
    __device__ __forceinline__ void quantize(const float (&x)[kEach], const Tables&,
                                             StatePack<F>& pack) const {
      uint32_t code[kEach];
      bool usual = true;
      if constexpr (kRoot) {  // a zero less 1 is the largest number
        uint32_t least = ~0u;
        for (int e = 0; e < kEach; ++e) {
          const uint32_t b = float_bits(x[e]) - 1;
          least = b < least ? b : least;
        }
        usual = least >= float_bits(kSmallest) - 1;
      }
      if (usual) {
        for (int e = 0; e < kEach; ++e) code[e] = one(x[e]);
      } else {
        const typename F::Scale s{scale, divisor, true};
        for (int e = 0; e < kEach; ++e) code[e] = F::quantize(s.to_z(x[e]));
      }
      pack_codes<F>(code, coded, pack);
    }
  };
};

// ---- codes that are evenly spaced in the logarithm ----

template <class F>
concept IsLog = __is_same(F, Log8) || __is_same(F, Log8Signed);

/// Core's functions, which take neither tables nor branches.
template <class F>
  requires IsLog<F>
struct Fixed<F> {
  struct Tables {};
  static __device__ __forceinline__ void fill(Tables&, int, int) {}
  static __device__ __forceinline__ void dequantize(const StatePack<F>& pack, const Tables&,
                                                    float (&z)[kEach]) {
    for (int e = 0; e < kEach; ++e) z[e] = F::dequantize(pack.get(e));
  }

  struct Encoder {
    typename F::Scale scale;
    /// absmin: the smallest magnitude that is not 0.
    __device__ __forceinline__ Encoder(uint32_t absmax, uint32_t absmin)
        : scale(F::Scale::of(absmax, absmin)) {}
    __device__ __forceinline__ void write(float* to) const { scale.write(to); }
    __device__ __forceinline__ void quantize(const float (&x)[kEach], const Tables&,
                                             StatePack<F>& pack) const {
      uint32_t code[kEach];
      const uint32_t coded = scale.coded ? ~0u : 0u;
      for (int e = 0; e < kEach; ++e) code[e] = F::quantize(scale.to_z(x[e]));
      pack_codes<F>(code, coded, pack);
    }
  };
};

}  // namespace lowbit::cuda
