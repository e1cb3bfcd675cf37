// The AVX-512 primitives of codebook_block.h: sixteen values, tables of 32 entries in two
// registers.
#pragma once

#include <immintrin.h>

#include "core/macros.h"

namespace lowbit {

struct CodebookVector {
  using Float = __m512;
  using Int = __m512i;
  using Mask = __mmask16;
  static constexpr int kLanes = 16, kLog2Table = 5;  // entries of one lookup instruction
  static constexpr int kLog2Dequantized = 7;  // largest maps that are dequantized from registers

  LB_HD static Float load(const float* x) { return _mm512_loadu_ps(x); }
  LB_HD static void store(float* out, Float x) { _mm512_storeu_ps(out, x); }
  LB_HD static Float all(float x) { return _mm512_set1_ps(x); }
  LB_HD static Int zero() { return _mm512_setzero_si512(); }
  LB_HD static Float times(Float a, Float b) { return _mm512_mul_ps(a, b); }
  LB_HD static Mask at_least(Float a, Float b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
  LB_HD static Int set(Int answers, Mask where, int bit) {
    return _mm512_mask_or_epi32(answers, where, answers, _mm512_set1_epi32(bit));
  }
  LB_HD static Float choose(Mask where, Float low, Float high) {
    return _mm512_mask_blend_ps(where, low, high);
  }
  LB_HD static Int load_bytes(const uint8_t* codes) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  }

  /// Entry index mod 2^kLog2 of a table. In a table shorter than a register the remaining entries
  /// are arbitrary.
  template <int kLog2>
  LB_HD static Float table(const float* t, Int index) {
    if constexpr (kLog2 <= 4) {
      return _mm512_permutexvar_ps(index, load(t));
    } else {
      return _mm512_permutex2var_ps(load(t), index, load(t + 16));
    }
  }
  template <int kLog2>
  LB_HD static Float dequantize(const float* value, Int codes) {
    if constexpr (kLog2 <= kLog2Table) {
      return table<kLog2>(value, codes);
    } else {
      const Mask upper = _mm512_test_epi32_mask(codes, _mm512_set1_epi32(1 << (kLog2 - 1)));
      return choose(upper, dequantize<kLog2 - 1>(value, codes),
                    dequantize<kLog2 - 1>(value + (1 << (kLog2 - 1)), codes));
    }
  }

  /// The answers of four registers as bytes, each half replaced by its entry.
  template <bool kUpper>
  LB_HD static void store_bytes(const Int (&a)[4], const uint8_t* lower, const uint8_t* upper,
                                uint8_t* codes) {
    const Int low = _mm512_packus_epi32(a[0], a[1]), high = _mm512_packus_epi32(a[2], a[3]);
    const Int lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const Int bytes = _mm512_permutexvar_epi32(lanes, _mm512_packus_epi16(low, high));
    const Int half = _mm512_set1_epi8(15);
    Int turned = _mm512_shuffle_epi8(spread(lower), _mm512_and_si512(bytes, half));
    if constexpr (kUpper) {
      const Int above = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), half);
      turned = _mm512_or_si512(turned, _mm512_shuffle_epi8(spread(upper), above));
    }
    _mm512_storeu_si512(codes, turned);
  }

 private:
  LB_HD static Int spread(const uint8_t* table) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  }
};

}  // namespace lowbit
