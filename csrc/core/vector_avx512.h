// The AVX-512 primitives of quantizers: sixteen values, tables of 32 entries in two registers.
#pragma once

#include <immintrin.h>

#include "core/macros.h"

namespace lowbit {

struct Vector {
  using Float = __m512;
  using Int = __m512i;
  using Mask = __mmask16;
  static constexpr int kLanes = 16, kLog2Table = 5;  // entries of one lookup instruction
  static constexpr int kLog2Dequantized = 7;  // largest maps that are dequantized from registers
  static constexpr int kLog2ByChance = 7;     // and those with stochastic codes from registers
  static constexpr bool kScalesAll = true;    // `scaled` takes subnormal results and infinity

  LB_HD static Float load(const float* x) { return _mm512_loadu_ps(x); }
  LB_HD static void store(float* out, Float x) { _mm512_storeu_ps(out, x); }
  LB_HD static Float all(float x) { return _mm512_set1_ps(x); }
  LB_HD static Int zero() { return _mm512_setzero_si512(); }
  LB_HD static Float times(Float a, Float b) { return _mm512_mul_ps(a, b); }
  LB_HD static Mask at_least(Float a, Float b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
  LB_HD static bool every(Mask where) { return where == 0xffff; }
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
  /// Entries of 16 bytes by the low 4 bits of half the exponent of a >= 0.
  LB_HD static Int by_half_exponent(const uint8_t* bytes, Float a) {
    return _mm512_srli_epi32(_mm512_shuffle_epi8(spread(bytes), bits(a)), 24);
  }
  LB_HD static Int next_where(Int a, Mask where) {
    return _mm512_mask_add_epi32(a, where, a, _mm512_set1_epi32(1));
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

  // For stochastic codes.
  LB_HD static Int all_words(int x) { return _mm512_set1_epi32(x); }
  LB_HD static Float plus(Float a, Float b) { return _mm512_add_ps(a, b); }
  LB_HD static Float minus(Float a, Float b) { return _mm512_sub_ps(a, b); }
  LB_HD static Float over(Float a, Float b) { return _mm512_div_ps(a, b); }
  LB_HD static Float root(Float a) { return _mm512_sqrt_ps(a); }
  LB_HD static Float larger(Float a, Float b) { return _mm512_max_ps(a, b); }
  LB_HD static Float smaller(Float a, Float b) { return _mm512_min_ps(a, b); }
  /// a * b + c, a * b - c and c - a * b
  LB_HD static Float plus_product(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  LB_HD static Float product_minus(Float a, Float b, Float c) { return _mm512_fmsub_ps(a, b, c); }
  LB_HD static Float minus_product(Float a, Float b, Float c) { return _mm512_fnmadd_ps(a, b, c); }
  /// Ties to even.
  LB_HD static Float nearest_integer(Float a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  /// a * 2^n, n an integer
  LB_HD static Float scaled(Float a, Float n) { return _mm512_scalef_ps(a, n); }
  LB_HD static Float magnitude(Float a) { return _mm512_andnot_ps(all(-0.0f), a); }
  /// a >= 0 with the sign of z
  LB_HD static Float signed_as(Float a, Float z) {
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(bits(a), bits(z), bits(all(-0.0f)), 0xF8));  // a | (z & sign)
  }
  /// x where z is positive, 0 elsewhere
  LB_HD static Float where_positive(Float z, Float x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_GT_OQ), x);
  }
  LB_HD static Int bits(Float a) { return _mm512_castps_si512(a); }
  LB_HD static Int rounded(Float a) { return _mm512_cvtps_epi32(a); }
  LB_HD static Float to_float(Int a) { return _mm512_cvtepi32_ps(a); }
  LB_HD static Int plus(Int a, Int b) { return _mm512_add_epi32(a, b); }
  LB_HD static Int minus(Int a, Int b) { return _mm512_sub_epi32(a, b); }
  LB_HD static Int both(Int a, Int b) { return _mm512_and_si512(a, b); }
  LB_HD static Int either(Int a, Int b) { return _mm512_xor_si512(a, b); }
  /// b without the bits of a
  LB_HD static Int without(Int a, Int b) { return _mm512_andnot_si512(a, b); }
  template <int kBits>
  LB_HD static Int up(Int a) {
    return _mm512_slli_epi32(a, kBits);
  }
  template <int kBits>
  LB_HD static Int down(Int a) {
    return _mm512_srli_epi32(a, kBits);
  }
  /// The same with copies of the sign.
  template <int kBits>
  LB_HD static Int down_signed(Int a) {
    return _mm512_srai_epi32(a, kBits);
  }
  LB_HD static Int smaller_halves(Int a, Int b) { return _mm512_min_epu16(a, b); }
  LB_HD static Int smaller_words(Int a, Int b) { return _mm512_min_epu32(a, b); }
  LB_HD static Int load_chance(const uint16_t* random16) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(random16)));
  }
  /// a where bit kBit of k is set, a ^ flipped elsewhere
  template <int kBit>
  LB_HD static Int flip_below(Int k, Int a, Int flipped) {
    const Mask below = _mm512_testn_epi32_mask(k, _mm512_set1_epi32(static_cast<int>(1u << kBit)));
    return _mm512_mask_xor_epi32(a, below, a, flipped);
  }
  LB_HD static Float floats(Int a) { return _mm512_castsi512_ps(a); }
  /// -a where z has a sign.
  LB_HD static Int with_sign(Int a, Float z) {
    return _mm512_mask_sub_epi32(a, _mm512_movepi32_mask(bits(z)), zero(), a);
  }
  /// A bit for each word below 2^kBits.
  template <int kBits>
  LB_HD static uint32_t below(Int a) {
    return _mm512_cmplt_epu32_mask(a, _mm512_set1_epi32(1 << kBits));
  }
  /// Stores the top bytes of words, a sign and a magnitude, with minus zero as zero.
  LB_HD static void store_signed(const Int (&a)[4], uint8_t* codes) {
    const Int top[4] = {down<24>(a[0]), down<24>(a[1]), down<24>(a[2]), down<24>(a[3])};
    const Int bytes = in_order(top);
    const __mmask64 kept =
        _mm512_cmpneq_epi8_mask(bytes, _mm512_set1_epi8(static_cast<char>(0x80)));
    _mm512_storeu_si512(codes, _mm512_maskz_mov_epi8(kept, bytes));
  }
  /// Marks by bit 7 answers where the sum of a share and chance goes to the next entry.
  LB_HD static Int mark(Int answers, Int sum) {
    return set(answers, _mm512_test_epi32_mask(sum, _mm512_set1_epi32(1 << 16)), 0x80);
  }
  /// A bit for each value that is unsure.
  template <int kUnsure>
  LB_HD static uint32_t unsure(Int least) {
    return unsure(least, _mm512_set1_epi32(kUnsure));
  }
  LB_HD static uint32_t unsure(Int least, Int window) {
    const Int part = _mm512_and_si512(least, _mm512_set1_epi32(0xffff));
    return _mm512_cmplt_epi32_mask(part, window);
  }
  /// Stores words below 2^16.
  LB_HD static void store_halves(uint16_t* out, Int a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(a));
  }
  /// Stores the upper halves of words as bytes: 255 for what is more.
  template <int kCount>
  LB_HD static void store_upper(const Int (&sum)[kCount], uint8_t* codes) {
    for (int v = 0; v < kCount; ++v)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 16 * v),
                       _mm512_cvtusepi32_epi8(_mm512_srli_epi32(sum[v], 16)));
  }
  /// As store_bytes, and a marked code is the next one.
  template <bool kUpper>
  LB_HD static void store_marked(const Int (&a)[4], const uint8_t* lower, const uint8_t* upper,
                                 uint8_t* codes) {
    const Int bytes = in_order(a), code = turned<kUpper>(bytes, lower, upper);
    const __mmask64 next = _mm512_movepi8_mask(bytes);
    _mm512_storeu_si512(codes, _mm512_mask_add_epi8(code, next, code, _mm512_set1_epi8(1)));
  }

  /// The answers of four registers as bytes, each half replaced by its entry.
  template <bool kUpper>
  LB_HD static void store_bytes(const Int (&a)[4], const uint8_t* lower, const uint8_t* upper,
                                uint8_t* codes) {
    _mm512_storeu_si512(codes, turned<kUpper>(in_order(a), lower, upper));
  }

 private:
  LB_HD static Int in_order(const Int (&a)[4]) {
    const Int low = _mm512_packus_epi32(a[0], a[1]), high = _mm512_packus_epi32(a[2], a[3]);
    const Int lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(lanes, _mm512_packus_epi16(low, high));
  }
  template <bool kUpper>
  LB_HD static Int turned(Int bytes, const uint8_t* lower, const uint8_t* upper) {
    const Int half = _mm512_set1_epi8(15);
    Int turned = _mm512_shuffle_epi8(spread(lower), _mm512_and_si512(bytes, half));
    if constexpr (kUpper) {
      const Int above = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), half);
      turned = _mm512_or_si512(turned, _mm512_shuffle_epi8(spread(upper), above));
    }
    return turned;
  }
  LB_HD static Int spread(const uint8_t* table) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  }
};

}  // namespace lowbit
