// The AVX2 primitives of quantizers: eight values, tables of 8 entries in a register.
#pragma once

#include <immintrin.h>

#include "core/macros.h"

namespace lowbit {

struct Vector {
  using Float = __m256;
  using Int = __m256i;
  using Mask = __m256;
  static constexpr int kLanes = 8, kLog2Table = 3;  // entries of one lookup instruction
  static constexpr int kLog2Dequantized = 4;  // largest maps that are dequantized from registers
  static constexpr int kLog2ByChance = 5;     // and those with stochastic codes from registers
  static constexpr bool kScalesAll = false;   // `scaled` takes normal results

  LB_HD static Float load(const float* x) { return _mm256_loadu_ps(x); }
  LB_HD static void store(float* out, Float x) { _mm256_storeu_ps(out, x); }
  LB_HD static Float all(float x) { return _mm256_set1_ps(x); }
  LB_HD static Int zero() { return _mm256_setzero_si256(); }
  LB_HD static Float times(Float a, Float b) { return _mm256_mul_ps(a, b); }
  LB_HD static Mask at_least(Float a, Float b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
  LB_HD static bool every(Mask where) { return _mm256_movemask_ps(where) == 0xff; }
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
  /// Entries of 16 bytes by the low 4 bits of half the exponent of a >= 0.
  LB_HD static Int by_half_exponent(const uint8_t* bytes, Float a) {
    const Int table =
        _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
    return _mm256_srli_epi32(_mm256_shuffle_epi8(table, bits(a)), 24);
  }
  LB_HD static Int next_where(Int a, Mask where) {
    return _mm256_sub_epi32(a, _mm256_castps_si256(where));
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

  // For stochastic codes.
  LB_HD static Int all_words(int x) { return _mm256_set1_epi32(x); }
  LB_HD static Float plus(Float a, Float b) { return _mm256_add_ps(a, b); }
  LB_HD static Float minus(Float a, Float b) { return _mm256_sub_ps(a, b); }
  LB_HD static Float over(Float a, Float b) { return _mm256_div_ps(a, b); }
  LB_HD static Float root(Float a) { return _mm256_sqrt_ps(a); }
  LB_HD static Float larger(Float a, Float b) { return _mm256_max_ps(a, b); }
  LB_HD static Float smaller(Float a, Float b) { return _mm256_min_ps(a, b); }
  /// a * b + c, a * b - c and c - a * b
  LB_HD static Float plus_product(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  LB_HD static Float product_minus(Float a, Float b, Float c) { return _mm256_fmsub_ps(a, b, c); }
  LB_HD static Float minus_product(Float a, Float b, Float c) { return _mm256_fnmadd_ps(a, b, c); }
  /// Ties to even.
  LB_HD static Float nearest_integer(Float a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  /// a * 2^n, n an integer
  LB_HD static Float scaled(Float a, Float n) {
    return floats(plus(bits(a), _mm256_slli_epi32(rounded(n), 23)));
  }
  LB_HD static Float magnitude(Float a) { return _mm256_andnot_ps(all(-0.0f), a); }
  /// a >= 0 with the sign of z
  LB_HD static Float signed_as(Float a, Float z) {
    return _mm256_or_ps(a, _mm256_and_ps(all(-0.0f), z));
  }
  /// x where z is positive, 0 elsewhere
  LB_HD static Float where_positive(Float z, Float x) {
    return _mm256_and_ps(_mm256_cmp_ps(z, _mm256_setzero_ps(), _CMP_GT_OQ), x);
  }
  LB_HD static Int bits(Float a) { return _mm256_castps_si256(a); }
  LB_HD static Int rounded(Float a) { return _mm256_cvtps_epi32(a); }
  LB_HD static Float to_float(Int a) { return _mm256_cvtepi32_ps(a); }
  LB_HD static Int plus(Int a, Int b) { return _mm256_add_epi32(a, b); }
  LB_HD static Int minus(Int a, Int b) { return _mm256_sub_epi32(a, b); }
  LB_HD static Int both(Int a, Int b) { return _mm256_and_si256(a, b); }
  LB_HD static Int either(Int a, Int b) { return _mm256_xor_si256(a, b); }
  /// b without the bits of a
  LB_HD static Int without(Int a, Int b) { return _mm256_andnot_si256(a, b); }
  template <int kBits>
  LB_HD static Int up(Int a) {
    return _mm256_slli_epi32(a, kBits);
  }
  template <int kBits>
  LB_HD static Int down(Int a) {
    return _mm256_srli_epi32(a, kBits);
  }
  /// The same with copies of the sign.
  template <int kBits>
  LB_HD static Int down_signed(Int a) {
    return _mm256_srai_epi32(a, kBits);
  }
  LB_HD static Int smaller_halves(Int a, Int b) { return _mm256_min_epu16(a, b); }
  LB_HD static Int smaller_words(Int a, Int b) { return _mm256_min_epu32(a, b); }
  LB_HD static Int load_chance(const uint16_t* random16) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(random16)));
  }
  /// a where bit kBit of k is set, a ^ flipped elsewhere
  template <int kBit>
  LB_HD static Int flip_below(Int k, Int a, Int flipped) {
    if constexpr (kBit < 31) k = _mm256_slli_epi32(k, 31 - kBit);
    return _mm256_xor_si256(a, _mm256_andnot_si256(_mm256_srai_epi32(k, 31), flipped));
  }
  LB_HD static Float floats(Int a) { return _mm256_castsi256_ps(a); }
  /// -a where z has a sign. Zero where z is zero.
  LB_HD static Int with_sign(Int a, Float z) { return _mm256_sign_epi32(a, bits(z)); }
  /// A bit for each word below 2^kBits.
  template <int kBits>
  LB_HD static uint32_t below(Int a) {
    const Int small = _mm256_cmpeq_epi32(_mm256_srli_epi32(a, kBits), zero());
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(small)));
  }
  /// Stores the top bytes of words, a sign and a magnitude, with minus zero as zero.
  LB_HD static void store_signed(const Int (&a)[4], uint8_t* codes) {
    const Int top[4] = {down<24>(a[0]), down<24>(a[1]), down<24>(a[2]), down<24>(a[3])};
    const Int bytes = in_order(top);
    store_all(codes,
              _mm256_andnot_si256(
                  _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(static_cast<char>(0x80))), bytes));
  }
  /// Marks by bit 7 answers where the sum of a share and chance goes to the next entry.
  LB_HD static Int mark(Int answers, Int sum) {
    return _mm256_or_si256(answers,
                           _mm256_and_si256(_mm256_srli_epi32(sum, 9), _mm256_set1_epi32(0x80)));
  }
  /// A bit for each value that is unsure.
  template <int kUnsure>
  LB_HD static uint32_t unsure(Int least) {
    return unsure(least, _mm256_set1_epi32(kUnsure));
  }
  LB_HD static uint32_t unsure(Int least, Int window) {
    const Int part = _mm256_and_si256(least, _mm256_set1_epi32(0xffff));
    return static_cast<uint32_t>(
        _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(window, part))));
  }
  /// Stores words below 2^16.
  LB_HD static void store_halves(uint16_t* out, Int a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
  }
  /// Stores the upper halves of words as bytes: 255 for what is more, 0 for what is negative.
  LB_HD static void store_upper(const Int (&sum)[4], uint8_t* codes) {
    const Int a[4] = {_mm256_srai_epi32(sum[0], 16), _mm256_srai_epi32(sum[1], 16),
                      _mm256_srai_epi32(sum[2], 16), _mm256_srai_epi32(sum[3], 16)};
    store_all(codes, in_order(a));
  }
  /// As store_bytes, and a marked code is the next one.
  template <bool kUpper>
  LB_HD static void store_marked(const Int (&a)[4], const uint8_t* lower, const uint8_t* upper,
                                 uint8_t* codes) {
    const Int bytes = in_order(a), next = _mm256_cmpgt_epi8(zero(), bytes);
    store_all(codes, _mm256_sub_epi8(turned<kUpper>(bytes, lower, upper), next));
  }

  /// The answers of four registers as bytes, each half replaced by its entry.
  template <bool kUpper>
  LB_HD static void store_bytes(const Int (&a)[4], const uint8_t* lower, const uint8_t* upper,
                                uint8_t* codes) {
    store_all(codes, turned<kUpper>(in_order(a), lower, upper));
  }

 private:
  LB_HD static Int in_order(const Int (&a)[4]) {
    const Int low = _mm256_packus_epi32(a[0], a[1]), high = _mm256_packus_epi32(a[2], a[3]);
    const Int lanes = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), lanes);
  }
  template <bool kUpper>
  LB_HD static Int turned(Int bytes, const uint8_t* lower, const uint8_t* upper) {
    const Int half = _mm256_set1_epi8(15);
    Int turned = _mm256_shuffle_epi8(spread(lower), _mm256_and_si256(bytes, half));
    if constexpr (kUpper) {
      const Int above = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), half);
      turned = _mm256_or_si256(turned, _mm256_shuffle_epi8(spread(upper), above));
    }
    return turned;
  }
  LB_HD static void store_all(uint8_t* codes, Int bytes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
  }
  LB_HD static Int spread(const uint8_t* table) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  }
};

}  // namespace lowbit
