// The AVX2 primitives of codebook_block.h: eight values, tables of 8 entries in a register.
#pragma once

#include <immintrin.h>

#include "core/macros.h"

namespace lowbit {

struct CodebookVector {
  using Float = __m256;
  using Int = __m256i;
  using Mask = __m256;
  static constexpr int kLanes = 8, kLog2Table = 3;  // entries of one lookup instruction
  static constexpr int kLog2Dequantized = 4;  // largest maps that are dequantized from registers

  LB_HD static Float load(const float* x) { return _mm256_loadu_ps(x); }
  LB_HD static void store(float* out, Float x) { _mm256_storeu_ps(out, x); }
  LB_HD static Float all(float x) { return _mm256_set1_ps(x); }
  LB_HD static Int zero() { return _mm256_setzero_si256(); }
  LB_HD static Float times(Float a, Float b) { return _mm256_mul_ps(a, b); }
  LB_HD static Mask at_least(Float a, Float b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
  LB_HD static Int set(Int answers, Mask where, int bit) {
    return _mm256_or_si256(answers,
                           _mm256_and_si256(_mm256_castps_si256(where), _mm256_set1_epi32(bit)));
  }
  LB_HD static Float choose(Mask where, Float low, Float high) {
    return _mm256_blendv_ps(low, high, where);
  }
  LB_HD static Int load_bytes(const uint8_t* codes) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  }

  /// Entry index mod 2^kLog2 of a table. In a table shorter than a register the remaining entries
  /// are arbitrary.
  template <int kLog2>
  LB_HD static Float table(const float* t, Int index) {
    return _mm256_permutevar8x32_ps(load(t), index);
  }
  template <int kLog2>
  LB_HD static Float dequantize(const float* value, Int codes) {
    if constexpr (kLog2 <= 3) {
      return table<kLog2>(value, codes);
    } else {
      const Mask upper = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 32 - kLog2));
      return choose(upper, dequantize<kLog2 - 1>(value, codes),
                    dequantize<kLog2 - 1>(value + (1 << (kLog2 - 1)), codes));
    }
  }

  /// The answers of four registers as bytes, each half replaced by its entry.
  template <bool kUpper>
  LB_HD static void store_bytes(const Int (&a)[4], const uint8_t* lower, const uint8_t* upper,
                                uint8_t* codes) {
    const Int low = _mm256_packus_epi32(a[0], a[1]), high = _mm256_packus_epi32(a[2], a[3]);
    const Int lanes = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const Int bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), lanes);
    const Int half = _mm256_set1_epi8(15);
    Int turned = _mm256_shuffle_epi8(spread(lower), _mm256_and_si256(bytes, half));
    if constexpr (kUpper) {
      const Int above = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), half);
      turned = _mm256_or_si256(turned, _mm256_shuffle_epi8(spread(upper), above));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), turned);
  }

 private:
  LB_HD static Int spread(const uint8_t* table) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  }
};

}  // namespace lowbit
