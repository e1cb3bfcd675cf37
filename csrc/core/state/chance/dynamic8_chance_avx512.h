// dynamic8_chance.h, sixteen values to a register and 64 per iteration.
//
// Included by dynamic8_avx512.h, at its end, and by nothing else.
#pragma once

#include <immintrin.h>

#include "core/state/chance/dynamic8_chance.h"

namespace lowbit {

/// The lines by the low 4 bits of exponent / 2, as in Dynamic8Registers.
template <int kUnsigned>
struct Dynamic8ChanceRegisters {
  static constexpr uint32_t kLowest = Dynamic8Steps<kUnsigned>::kLowest;
  alignas(64) uint32_t carry[16] = {};
  alignas(64) float inside_slope[16] = {}, inside_offset[16] = {};
  alignas(64) float after_slope[16] = {}, after_offset[16] = {};

  constexpr explicit Dynamic8ChanceRegisters(const Dynamic8Positions<kUnsigned>& p) {
    set(0, 7, p);  // the target of the carry out of the last segment
    for (uint32_t e = kLowest; e < 64; ++e) {
      const int segment = segment_at(p, e);
      set(e & 15, segment, p);
      if (segment == 7 || p.from[segment + 1] >= bits_float((e + 1) << 24)) continue;
      carry[e & 15] = ((e + 1) << 24) - float_bits(p.from[segment + 1]);
    }
  }

 private:
  constexpr void set(uint32_t at, int segment, const Dynamic8Positions<kUnsigned>& p) {
    inside_slope[at] = p.inside_slope[segment], inside_offset[at] = p.inside_offset[segment];
    after_slope[at] = p.after_slope[segment], after_offset[at] = p.after_offset[segment];
  }
};
constexpr Dynamic8ChanceRegisters<0> kDynamic8Chance{kDynamic8Positions};
constexpr Dynamic8ChanceRegisters<1> kDynamic8UnsignedChance{kDynamic8UnsignedPositions};

template <class Format>
struct Dynamic8ByChance {
  static constexpr int kUnsigned = Format::kSigned ? 0 : 1;
  using Registers = Dynamic8ChanceRegisters<kUnsigned>;
  static constexpr int kUnsure = Dynamic8Positions<kUnsigned>::kUnsure;
  static constexpr const Registers& registers() {
    if constexpr (kUnsigned) {
      return kDynamic8UnsignedChance;
    } else {
      return kDynamic8Chance;
    }
  }
  __m512i carry = _mm512_load_si512(registers().carry);
  __m512 inside_slope = _mm512_load_ps(registers().inside_slope),
         inside_offset = _mm512_load_ps(registers().inside_offset),
         after_slope = _mm512_load_ps(registers().after_slope),
         after_offset = _mm512_load_ps(registers().after_offset);
  __m512 inverse;

  LB_HD explicit Dynamic8ByChance(float i) : inverse(_mm512_set1_ps(i)) {}

  /// Sums of position and chance. A value is unsure where the lower half of `least` is below
  /// kUnsure.
  LB_HD Four operator()(const float* x, const uint16_t* random16, Four& least) const {
    const __m512i all = _mm512_set1_epi32(0xffff), half = _mm512_set1_epi32(0x8000);
    const __m512i past = _mm512_set1_epi32(kUnsure / 2), past_half = _mm512_add_epi32(half, past);
    const __m512i lowest = _mm512_set1_epi32(static_cast<int>(Registers::kLowest << 24));
    const __m512 absolute = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff));
    __m512 z[4], a[4], u[4];
    __m512i at[4];
    for (int j = 0; j < 4; ++j) z[j] = _mm512_mul_ps(_mm512_loadu_ps(x + 16 * j), inverse);
    for (int j = 0; j < 4; ++j) a[j] = Format::kSigned ? _mm512_and_ps(z[j], absolute) : z[j];
    for (int j = 0; j < 4; ++j) at[j] = _mm512_max_epi32(_mm512_castps_si512(a[j]), lowest);
    for (int j = 0; j < 4; ++j) {
      const __m512i more = _mm512_permutexvar_epi32(_mm512_srli_epi32(at[j], 24), carry);
      at[j] = _mm512_srli_epi32(_mm512_add_epi32(at[j], more), 24);
    }
    for (int j = 0; j < 4; ++j)
      u[j] = _mm512_min_ps(_mm512_fmadd_ps(a[j], _mm512_permutexvar_ps(at[j], inside_slope),
                                           _mm512_permutexvar_ps(at[j], inside_offset)),
                           _mm512_fmadd_ps(a[j], _mm512_permutexvar_ps(at[j], after_slope),
                                           _mm512_permutexvar_ps(at[j], after_offset)));
    Four k;
    for (int j = 0; j < 4; ++j) {
      if constexpr (Format::kSigned) {
        const __m512 sign = _mm512_andnot_ps(absolute, z[j]);
        k.v[j] = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_or_ps(u[j], sign)),
                                  _mm512_set1_epi32(127 << 16));
        k.v[j] = _mm512_max_epi32(k.v[j], _mm512_setzero_si512());  // there is no code -1
      } else {
        // A positive value never becomes zero.
        u[j] = _mm512_max_ps(u[j], _mm512_set1_ps(65536.0f));
        const __mmask16 positive = _mm512_cmp_ps_mask(z[j], _mm512_setzero_ps(), _CMP_GT_OQ);
        k.v[j] = _mm512_maskz_cvtps_epi32(positive, u[j]);
      }
    }
    for (int j = 0; j < 4; ++j) {
      const __m512i r = _mm512_cvtepu16_epi32(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(random16 + 16 * j)));
      const __mmask16 lower = _mm512_testn_epi32_mask(k.v[j], half);
      const __m512i nearer = _mm512_add_epi32(k.v[j], past_half);
      k.v[j] =
          _mm512_add_epi32(_mm512_add_epi32(k.v[j], past), _mm512_mask_xor_epi32(r, lower, r, all));
      least.v[j] = _mm512_min_epu16(nearer, k.v[j]);
    }
    return k;
  }
};

template <class Format>
LB_HD void quantize64_by_chance(const Dynamic8ByChance<Format>& quantizer, const float* x,
                                float inverse, const uint16_t* random16, uint8_t* codes) {
  const __m512i limit = _mm512_set1_epi16(Dynamic8ByChance<Format>::kUnsure);
  Four least;
  store_codes(quantizer(x, random16, least), codes);
  const __m512i minimum = _mm512_min_epu16(_mm512_min_epu16(least.v[0], least.v[1]),
                                           _mm512_min_epu16(least.v[2], least.v[3]));
  if (__builtin_expect(_mm512_mask_cmplt_epu16_mask(0x55555555, minimum, limit) == 0, 1)) return;
  asm volatile("" ::: "memory");  // as in quantize_unsure
  (void)quantizer(x, random16, least);
  for (int j = 0; j < 4; ++j) {
    for (uint32_t left = _mm512_mask_cmplt_epu16_mask(0x55555555, least.v[j], limit); left != 0;
         left &= left - 1) {
      const int at = 16 * j + __builtin_ctz(left) / 2;
      codes[at] = dynamic8_by_chance<Format>(x[at], inverse, random16[at]);
    }
  }
}

template <class Format>
  requires __is_same
(Format, Dynamic8) || __is_same(Format, Dynamic8Unsigned) LB_HD
    void quantize_block_by_chance(Format, const float* x, const BlockScale& s,
                                  const uint16_t* random16, uint8_t* codes, int n) {
  const Dynamic8ByChance<Format> quantizer(s.inverse);
  in_turns<64>(x, random16, codes, n,
               [&](const float* some, const uint16_t* chance, uint8_t* out) LB_LAMBDA {
                 quantize64_by_chance<Format>(quantizer, some, s.inverse, chance, out);
               });
}

}  // namespace lowbit
