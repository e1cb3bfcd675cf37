// The same bits as dynamic8.h, with sixteen values per register and 64 per iteration. Every table
// is in registers.
//
// dequantize: a float is two 16-bit halves, each looked up among 64. Lookups, selection and sign
// work on 32 values per instruction. With byte permutes (VBMI) a float is four bytes, each looked
// up among 128, on 64 values per instruction.
//
// quantize: two neighboring binades contain at most one boundary between decades, so half the
// exponent selects a segment. The distance from the segment's boundary to its end is added to the
// bits, and the carry moves a value past the boundary into the next segment. The segment's line
// slope * z + offset, limited to its last ordinal, rounds to the ordinal. Values next to a rounding
// boundary, in less than 1 of 100 turns, are asked of the scalar definition.
//
// Included by dynamic8.h, at its end, and by nothing else.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "core/state/turns.h"
#include "core/words_avx512.h"

namespace lowbit {

template <int kUnsigned>
struct Dynamic8Registers : Dynamic8Steps<kUnsigned> {
  using Steps = Dynamic8Steps<kUnsigned>;
  using Tables = Dynamic8Tables<kUnsigned>;
  static constexpr int kHalves = kUnsigned ? 256 : 128;
#if defined(__AVX512VBMI__)
  alignas(64) uint8_t byte[4][kHalves] = {};  // of the magnitudes
#else
  alignas(64) uint16_t low[kHalves] = {}, high[kHalves] = {};  // of the magnitudes
#endif
  // Indexed by the low 4 bits of exponent / 2:
  alignas(64) uint32_t carry[16] = {};  // added to a key, moves those past the boundary up by one
  alignas(64) float slope[16] = {}, offset[16] = {}, last[16] = {};

  // Unsigned lines include the rounding offset: half an ordinal plus half of the uncertain range.
  static constexpr float kBias = kUnsigned ? Steps::kRound : 0;

  constexpr explicit Dynamic8Registers(const Tables& t) {
    for (int m = 0; m < kHalves; ++m) {
#if defined(__AVX512VBMI__)
      for (int b = 0; b < 4; ++b)
        byte[b][m] = static_cast<uint8_t>(float_bits(t.magnitude[m]) >> 8 * b);
#else
      low[m] = static_cast<uint16_t>(float_bits(t.magnitude[m]));
      high[m] = static_cast<uint16_t>(float_bits(t.magnitude[m]) >> 16);
#endif
    }
    line(0, Tables::kDecades, t);  // the target of the carry out of the last segment
    for (uint32_t e = Steps::kLowest; e < 64; ++e) {  // values [2^(2e-127), 2^(2e-125))
      const float begin = bits_float(e << 24), end = bits_float((e + 1) << 24);
      int decade = -1;
      for (int i = 0; i <= Tables::kDecades; ++i) decade += begin >= t.from[i];
      line(e & 15, decade, t);
      const int next = decade < 0 ? 1 : decade + 1;  // the lowest two lines are one
      if (next > Tables::kDecades || t.from[next] >= end) continue;
      const int m = next < Tables::kDecades ? t.last[next - 1] : Tables::kTop - 1;
      const bool tie =
          2.0 * t.from[next] == static_cast<double>(t.magnitude[m]) + t.magnitude[m + 1];
      carry[e & 15] = ((e + 1) << Steps::kShift) - Steps::key(float_bits(t.from[next]), tie);
    }
  }

 private:
  constexpr void line(int at, int decade, const Tables& t) {
    ordinals(at, decade, t);
    slope[at] *= Steps::kOne;
    offset[at] = offset[at] * Steps::kOne + kBias, last[at] = last[at] * Steps::kOne + kBias;
  }
  constexpr void ordinals(int at, int decade, const Tables& t) {
    if (decade == Tables::kDecades) {
      offset[at] = last[at] = static_cast<float>(Tables::kTop);
    } else if (decade > 0) {
      slope[at] = t.slope[decade];
      offset[at] = t.offset[decade] - 0.5f;
      last[at] = static_cast<float>(t.last[decade]);
    } else if (kUnsigned) {  // the ordinals 1 and 2; every positive value below them is 1
      slope[at] = 1.0f / (t.magnitude[1] + t.magnitude[2]);
      offset[at] = 1.0f;
      last[at] = 2.0f;
    } else {  // zero and the ordinal 1, halfway at from[0]
      slope[at] = 0.5f / t.from[0];
      last[at] = 1.0f;
    }
  }
};

constexpr Dynamic8Registers<0> kDynamic8Registers{Dynamic8Tables<0>{}};
constexpr Dynamic8Registers<1> kDynamic8UnsignedRegisters{Dynamic8Tables<1>{}};

#if defined(__AVX512VBMI__)

/// Byte kByte of kCount magnitudes, looked up by the low 7 or 8 bits of 64 ordinals.
template <int kByte, int kCount>
struct Bytes {
  __m512i table[kCount / 64];

  LB_HD explicit Bytes(const uint8_t (*bytes)[kCount]) {
    for (int i = 0; i < kCount / 64; ++i) table[i] = _mm512_load_si512(bytes[kByte] + 64 * i);
  }
  LB_HD __m512i operator()(__m512i index, __mmask64 bit7) const {
    const __m512i v = _mm512_permutex2var_epi8(table[0], index, table[1]);
    if constexpr (kCount == 128) {
      return v;
    } else {
      return _mm512_mask_mov_epi8(v, bit7, _mm512_permutex2var_epi8(table[2], index, table[3]));
    }
  }
};

/// out[i] = map(codes[i]) * scale for 64 codes, by four byte lookups.
template <class Format>
struct Dequantize64 {
  static constexpr int kCount = Format::kSigned ? 128 : 256;
  static constexpr const auto& registers() {
    if constexpr (Format::kSigned) {
      return kDynamic8Registers;
    } else {
      return kDynamic8UnsignedRegisters;
    }
  }
  Bytes<0, kCount> byte0{registers().byte};
  Bytes<1, kCount> byte1{registers().byte};
  Bytes<2, kCount> byte2{registers().byte};
  Bytes<3, kCount> byte3{registers().byte};
  static constexpr int kTurn = 64;

  LB_HD void operator()(const uint8_t* codes, __m512 scale, float* out) const {
    // Interleaving works within lanes, so each lane gets the codes it will output.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i code = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(codes));
    __m512i b[4];
    if constexpr (Format::kSigned) {
      const __m512i k = _mm512_sub_epi8(code, _mm512_set1_epi8(127)), m = _mm512_abs_epi8(k);
      // The tables lack the magnitude 1; its index finds the bytes of zero.
      const __mmask64 one = _mm512_movepi8_mask(m), none = 0;
      const __mmask64 negative = _mm512_cmplt_epu8_mask(code, _mm512_set1_epi8(127));
      b[0] = byte0(m, none), b[1] = byte1(m, none);
      b[2] = _mm512_mask_mov_epi8(byte2(m, none), one, _mm512_set1_epi8(static_cast<char>(0x80)));
      b[3] = _mm512_mask_mov_epi8(byte3(m, none), one, _mm512_set1_epi8(0x3f));
      b[3] = _mm512_mask_add_epi8(b[3], negative, b[3], _mm512_set1_epi8(static_cast<char>(0x80)));
    } else {
      const __mmask64 bit7 = _mm512_movepi8_mask(code);
      b[0] = byte0(code, bit7), b[1] = byte1(code, bit7);
      b[2] = byte2(code, bit7), b[3] = byte3(code, bit7);
    }
    const __m512i low[2] = {_mm512_unpacklo_epi8(b[0], b[1]), _mm512_unpackhi_epi8(b[0], b[1])};
    const __m512i high[2] = {_mm512_unpacklo_epi8(b[2], b[3]), _mm512_unpackhi_epi8(b[2], b[3])};
    for (int i = 0; i < 2; ++i) {
      const __m512i v = _mm512_unpacklo_epi16(low[i], high[i]),
                    w = _mm512_unpackhi_epi16(low[i], high[i]);
      _mm512_storeu_ps(out + 32 * i, _mm512_mul_ps(_mm512_castsi512_ps(v), scale));
      _mm512_storeu_ps(out + 32 * i + 16, _mm512_mul_ps(_mm512_castsi512_ps(w), scale));
    }
  }
};
using Dynamic8Dequantizer = Dequantize64<Dynamic8>;
using Dynamic8UnsignedDequantizer = Dequantize64<Dynamic8Unsigned>;

#else

/// 64 (signed) or 256 (unsigned) halves, looked up by the low 6 or 8 bits of 32 indices.
template <int kCount>
struct Halves {
  __m512i table[kCount / 32];

  LB_HD explicit Halves(const uint16_t* halves) {
    for (int i = 0; i < kCount / 32; ++i) table[i] = _mm512_load_si512(halves + 32 * i);
  }
  LB_HD __m512i operator()(__m512i index, __mmask32 bit6, __mmask32 bit7) const {
    const __m512i v = pair(0, index, bit6);
    if constexpr (kCount == 128) {
      return v;
    } else {
      return _mm512_mask_mov_epi16(v, bit7, pair(4, index, bit6));
    }
  }

 private:
  LB_HD __m512i pair(int i, __m512i index, __mmask32 bit6) const {
    const __m512i v = _mm512_permutex2var_epi16(table[i], index, table[i + 1]);
    return _mm512_mask_mov_epi16(v, bit6,
                                 _mm512_permutex2var_epi16(table[i + 2], index, table[i + 3]));
  }
};

/// The halves of the values of 32 codes.
struct Dynamic8Halves {
  Halves<128> low{kDynamic8Registers.low}, high{kDynamic8Registers.high};

  LB_HD void operator()(__m512i code, __m512i* l, __m512i* h) const {
    const __m512i k = _mm512_sub_epi16(code, _mm512_set1_epi16(127)), m = _mm512_abs_epi16(k);
    const __mmask32 bit6 = _mm512_test_epi16_mask(m, _mm512_set1_epi16(64));
    // Not in the tables; its index finds the halves of zero.
    const __mmask32 one = _mm512_test_epi16_mask(m, _mm512_set1_epi16(128));
    *l = low(m, bit6, 0);
    const __m512i v = _mm512_mask_mov_epi16(high(m, bit6, 0), one, _mm512_set1_epi16(0x3f80));
    // v | (k & sign)
    *h = _mm512_ternarylogic_epi32(v, k, _mm512_set1_epi16(static_cast<int16_t>(0x8000)), 0xF8);
  }
};

struct Dynamic8UnsignedHalves {
  Halves<256> low{kDynamic8UnsignedRegisters.low}, high{kDynamic8UnsignedRegisters.high};

  LB_HD void operator()(__m512i code, __m512i* l, __m512i* h) const {
    const __mmask32 bit6 = _mm512_test_epi16_mask(code, _mm512_set1_epi16(64));
    const __mmask32 bit7 = _mm512_test_epi16_mask(code, _mm512_set1_epi16(128));
    *l = low(code, bit6, bit7);
    *h = high(code, bit6, bit7);
  }
};

/// out[i] = map(codes[i]) * scale for 32 codes.
template <class Halves>
struct Dequantize32 {
  Halves halves;
  static constexpr int kTurn = 32;

  LB_HD void operator()(const uint8_t* codes, __m512 scale, float* out) const {
    // Interleaving works within lanes of four floats, so each lane gets the codes it will output.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    __m512i low, high;
    halves(_mm512_cvtepu8_epi16(_mm256_permutevar8x32_epi32(bytes, order)), &low, &high);
    _mm512_storeu_ps(out,
                     _mm512_mul_ps(_mm512_castsi512_ps(_mm512_unpacklo_epi16(low, high)), scale));
    _mm512_storeu_ps(out + 16,
                     _mm512_mul_ps(_mm512_castsi512_ps(_mm512_unpackhi_epi16(low, high)), scale));
  }
};
using Dynamic8Dequantizer = Dequantize32<Dynamic8Halves>;
using Dynamic8UnsignedDequantizer = Dequantize32<Dynamic8UnsignedHalves>;

#endif

template <class Dequantizer>
LB_HD void dequantize_all(const uint8_t* codes, float scale, float* out, int n) {
  const Dequantizer dequantizer;
  constexpr int kTurn = Dequantizer::kTurn;
  const __m512 scales = _mm512_set1_ps(scale);
  int i = 0;
  for (; i + kTurn <= n; i += kTurn) dequantizer(codes + i, scales, out + i);
  if (i < n) {
    uint8_t some[kTurn] = {};
    float dequantized[kTurn];
    std::memcpy(some, codes + i, static_cast<size_t>(n - i));
    dequantizer(some, scales, dequantized);
    std::memcpy(out + i, dequantized, static_cast<size_t>(n - i) * sizeof(float));
  }
}

/// out[i] = map(codes[i]) * scale
LB_HD void dequantize_block(Dynamic8, const uint8_t* codes, const BlockScale& s, float* out,
                            int n) {
  dequantize_all<Dynamic8Dequantizer>(codes, s.scale, out, n);
}
LB_HD void dequantize_block(Dynamic8Unsigned, const uint8_t* codes, const BlockScale& s, float* out,
                            int n) {
  dequantize_all<Dynamic8UnsignedDequantizer>(codes, s.scale, out, n);
}

/// For _mm512_range_ps: the first operand, limited in magnitude by the second.
constexpr int kLimited = 0x2;

/// Four registers that the quantizers process together. The instructions of one value form a long
/// chain, and the processor looks only about sixty instructions ahead.
struct Four {
  __m512i v[4];
};

/// Stores the third byte of every word.
LB_HD void store_codes(const Four& k, uint8_t* codes) {
#if defined(__AVX512VBMI__)
  const __m512i third = _mm512_castsi256_si512(
      _mm256_setr_epi8(2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74, 78,
                       82, 86, 90, 94, 98, 102, 106, 110, 114, 118, 122, 126));
  for (int j = 0; j < 4; j += 2) {
    const __m512i bytes = _mm512_permutex2var_epi8(k.v[j], third, k.v[j + 1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + 16 * j), _mm512_castsi512_si256(bytes));
  }
#else
  const __m512i upper = upper_words();
  for (int j = 0; j < 4; j += 2) {
    const __m512i words = _mm512_permutex2var_epi16(k.v[j], upper, k.v[j + 1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + 16 * j), _mm512_cvtepi16_epi8(words));
  }
#endif
}

/// The part shared by both quantizers.
template <int kUnsigned>
struct Dynamic8Lines {
  using Registers = Dynamic8Registers<kUnsigned>;
  __m512i carry;
  __m512 slope, offset, last, inverse;

  LB_HD Dynamic8Lines(const Registers& r, float inverse)
      : carry(_mm512_load_si512(r.carry)),
        slope(_mm512_load_ps(r.slope)),
        offset(_mm512_load_ps(r.offset)),
        last(_mm512_load_ps(r.last)),
        inverse(_mm512_set1_ps(inverse)) {}

  /// Adds the segments to the keys, in the low 4 bits.
  LB_HD void segments(__m512i (&key)[4]) const {
    const __m512i lowest =
        _mm512_set1_epi32(static_cast<int>(Registers::kLowest << Registers::kShift));
    __m512i half[4];
    for (int j = 0; j < 4; ++j) key[j] = _mm512_max_epu32(key[j], lowest);
    for (int j = 0; j < 4; ++j) half[j] = _mm512_srli_epi32(key[j], Registers::kShift);
    for (int j = 0; j < 4; ++j) half[j] = _mm512_permutexvar_epi32(half[j], carry);
    for (int j = 0; j < 4; ++j) key[j] = _mm512_add_epi32(key[j], half[j]);
    for (int j = 0; j < 4; ++j) key[j] = _mm512_srli_epi32(key[j], Registers::kShift);
  }
};

struct Dynamic8Quantizer : Dynamic8Lines<0> {
  /// Negated: the sign, which becomes the last bit of the key, is then that of positive values.
  LB_HD explicit Dynamic8Quantizer(float inverse)
      : Dynamic8Lines<0>(kDynamic8Registers, -inverse) {}

  /// Codes in steps of 2^-16.
  LB_HD Four operator()(const float* x) const {
    const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000u));
    __m512 w[4], u[4];
    __m512i at[4];
    for (int j = 0; j < 4; ++j) w[j] = _mm512_mul_ps(_mm512_loadu_ps(x + 16 * j), inverse);
    for (int j = 0; j < 4; ++j) at[j] = _mm512_rol_epi32(_mm512_castps_si512(w[j]), 1);
    segments(at);
    for (int j = 0; j < 4; ++j) {
      const __m512i start = _mm512_castps_si512(_mm512_permutexvar_ps(at[j], offset));
      u[j] = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(start, _mm512_castps_si512(w[j]), sign,
                                                           0xF8));  // start | (w & sign)
    }
    for (int j = 0; j < 4; ++j)
      u[j] = _mm512_fmadd_ps(w[j], _mm512_permutexvar_ps(at[j], slope), u[j]);
    for (int j = 0; j < 4; ++j)
      u[j] = _mm512_range_ps(u[j], _mm512_permutexvar_ps(at[j], last), kLimited);
    Four k;
    for (int j = 0; j < 4; ++j)
      k.v[j] = _mm512_sub_epi32(_mm512_set1_epi32((127 << 16) + Registers::kRound),
                                _mm512_cvtps_epi32(u[j]));
    // There is no code -1; the middle of 0 is certain.
    for (int j = 0; j < 4; ++j) k.v[j] = _mm512_max_epi32(k.v[j], _mm512_set1_epi32(1 << 15));
    return k;
  }
};

struct Dynamic8UnsignedQuantizer : Dynamic8Lines<1> {
  LB_HD explicit Dynamic8UnsignedQuantizer(float inverse)
      : Dynamic8Lines<1>(kDynamic8UnsignedRegisters, inverse) {}

  /// Codes in steps of 2^-16.
  LB_HD Four operator()(const float* x) const {
    __m512 z[4], u[4];
    __mmask16 positive[4];
    __m512i at[4];
    for (int j = 0; j < 4; ++j) z[j] = _mm512_mul_ps(_mm512_loadu_ps(x + 16 * j), inverse);
    for (int j = 0; j < 4; ++j) at[j] = _mm512_castps_si512(z[j]);
    segments(at);
    for (int j = 0; j < 4; ++j)
      positive[j] = _mm512_cmp_ps_mask(z[j], _mm512_setzero_ps(), _CMP_GT_OQ);
    for (int j = 0; j < 4; ++j) u[j] = _mm512_permutexvar_ps(at[j], offset);
    for (int j = 0; j < 4; ++j)
      u[j] = _mm512_fmadd_ps(z[j], _mm512_permutexvar_ps(at[j], slope), u[j]);
    for (int j = 0; j < 4; ++j) u[j] = _mm512_min_ps(u[j], _mm512_permutexvar_ps(at[j], last));
    Four k;
    for (int j = 0; j < 4; ++j)
      k.v[j] = _mm512_mask_cvtps_epi32(_mm512_set1_epi32(1 << 15), positive[j], u[j]);
    return k;
  }
};

/// Applies the scalar definition to values next to the middle of two ordinals. k is computed again:
/// kept for so rare a case it would be spilled to memory every time. The barrier keeps the compiler
/// from merging the two computations.
template <class Format, class Quantizer>
LB_HD void quantize_unsure(const Quantizer& quantizer, const float* x, float inverse,
                           uint8_t* codes) {
  asm volatile("" ::: "memory");
  const Four k = quantizer(x);
  for (int j = 0; j < 4; ++j) {
    const __m512i part = _mm512_and_si512(k.v[j], _mm512_set1_epi32(0xffff));
    for (unsigned left =
             _mm512_cmplt_epu32_mask(part, _mm512_set1_epi32(Quantizer::Registers::kUnsure));
         left != 0; left &= left - 1) {
      const int i = 16 * j + __builtin_ctz(left);
      codes[i] = static_cast<uint8_t>(Format::quantize(x[i] * inverse));
    }
  }
}

template <class Format, class Quantizer>
LB_HD void quantize64(const Quantizer& quantizer, const float* x, float inverse, uint8_t* codes) {
  const Four k = quantizer(x);
  store_codes(k, codes);
  const __m512i minimum =
      _mm512_min_epu16(_mm512_min_epu16(k.v[0], k.v[1]), _mm512_min_epu16(k.v[2], k.v[3]));
  const __mmask32 unsure = _mm512_mask_cmplt_epu16_mask(
      0x55555555, minimum, _mm512_set1_epi16(Quantizer::Registers::kUnsure));
  if (__builtin_expect(unsure != 0, 0)) quantize_unsure<Format>(quantizer, x, inverse, codes);
}

template <class Format, class Quantizer>
LB_HD void quantize_all(const float* x, float inverse, uint8_t* codes, int n) {
  const Quantizer quantizer(inverse);
  in_turns<64>(x, codes, n, [&](const float* some, uint8_t* out) LB_LAMBDA {
    quantize64<Format>(quantizer, some, inverse, out);
  });
}

/// codes[i] = the code nearest to x[i] * inverse
LB_HD void quantize_block(Dynamic8, const float* x, const BlockScale& s, uint8_t* codes, int n) {
  quantize_all<Dynamic8, Dynamic8Quantizer>(x, s.inverse, codes, n);
}
LB_HD void quantize_block(Dynamic8Unsigned, const float* x, const BlockScale& s, uint8_t* codes,
                          int n) {
  quantize_all<Dynamic8Unsigned, Dynamic8UnsignedQuantizer>(x, s.inverse, codes, n);
}

}  // namespace lowbit

#include "core/state/chance/dynamic8_chance_avx512.h"
