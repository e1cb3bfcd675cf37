// The same bits as dynamic8.h, sixteen values at a time, with every table in registers.
//
// decode: the ordinal's decade is the position of its leading one, which is the exponent of float(2 m + 1); its mantissa is the place inside the
// decade, so value = place * width + start, two permutes and one fma. That is at most two units in the last place from the entry;
// the difference is looked up as two bits in one register.
// encode: two neighbouring binades hold at most one boundary between decades, so the exponent (halved) indexes that boundary, one
// compare gives the decade, and slope * z + offset the ordinal. Lanes within kUnsure of a boundary ask the scalar definition.
#pragma once

#include <immintrin.h>

#include "core/state/dynamic8.h"

namespace lowbit {

template <int kExtra>
struct Dynamic8Registers {
  using Tables = Dynamic8Tables<kExtra>;
  static constexpr int kSteps = 16;
  alignas(64) float width[16] = {}, start[16] = {};  // by the low bits of the exponent of 2 k + 1
  alignas(64) uint32_t correction[16] = {};          // 2 bits an ordinal: entry - fma, plus 1
  alignas(64) float boundary[16] = {};               // by the low bits of exponent / 2
  alignas(64) float slope[32] = {}, offset[32] = {}, last[32] = {};  // the same, +16 where z >= boundary

  constexpr explicit Dynamic8Registers(const Tables& t) {
    double ten = 1e-6;
    for (int i = 0; i < Tables::kDecades; ++i, ten *= 10.0) {
      const int exponent = (127 + i + 1 + kExtra) & 15;
      width[exponent] = static_cast<float>(0.9 * ten);
      start[exponent] = static_cast<float>(0.1 * ten);
    }
    start[(127 + Tables::kDecades + 1 + kExtra) & 15] = 1.0f;
    for (int m = 0; m <= Tables::kTop; ++m) {
      const uint32_t wanted = float_bits(t.magnitude[m]), got = float_bits(unrounded(m));
      correction[m >> 4] |= (wanted - got + 1) << (2 * (m & 15));
    }
    for (int e = 48; e < 64; ++e) {  // values [2^(2e-127), 2^(2e-125))
      const float low = bits_float(static_cast<uint32_t>(e) << 24);
      const float high = bits_float(static_cast<uint32_t>(e + 1) << 24);
      int decade = -1;
      for (int i = 0; i <= Tables::kDecades; ++i) decade += low >= t.from[i];
      const bool split = decade < Tables::kDecades && t.from[decade + 1] < high;
      boundary[e & 15] = split ? t.from[decade + 1] : bits_float(kInfinityBits);
      set(e & 15, decade, t);
      set((e & 15) + 16, split ? decade + 1 : decade, t);
    }
  }

  /// What the permutes and the fma give for ordinal m (the product is exact in double).
  constexpr float unrounded(int m) const {
    const float f = static_cast<float>(2 * (m + kExtra) + 1);
    const uint32_t b = float_bits(f);
    const float place = bits_float((b & 0x7fffffu) | 0x3f800000u) - 1.0f;
    const int e = (b >> 23) & 15;
    return static_cast<float>(static_cast<double>(place) * width[e] + start[e]);
  }

 private:
  constexpr void set(int at, int decade, const Tables& t) {
    if (decade < 0 || decade == Tables::kDecades) {
      slope[at] = 0.0f;
      offset[at] = (decade < 0 ? static_cast<float>(kExtra ? 1 : 0) : static_cast<float>(Tables::kTop)) + 0.5f;
      last[at] = offset[at];
    } else {
      slope[at] = t.slope[decade];
      offset[at] = t.offset[decade];
      last[at] = static_cast<float>(t.last[decade]) + 0.5f;
    }
  }
};

constexpr Dynamic8Registers<0> kDynamic8Registers{Dynamic8Tables<0>{}};
constexpr Dynamic8Registers<1> kDynamic8UnsignedRegisters{Dynamic8Tables<1>{}};

template <int kExtra>
constexpr bool corrections_fit(const Dynamic8Registers<kExtra>& r) {
  constexpr Dynamic8Tables<kExtra> t{};
  for (int m = 0; m <= t.kTop; ++m) {
    if (float_bits(t.magnitude[m]) - float_bits(r.unrounded(m)) + 1 > 3) return false;
  }
  return true;
}
static_assert(corrections_fit(kDynamic8Registers) && corrections_fit(kDynamic8UnsignedRegisters));

template <int kExtra>
struct Dynamic8Lanes {
  __m512 width, start, boundary, slope0, slope1, offset0, offset1, last0, last1;
  __m512i correction;

  LB_HD explicit Dynamic8Lanes(const Dynamic8Registers<kExtra>& r)
      : width(_mm512_load_ps(r.width)), start(_mm512_load_ps(r.start)), boundary(_mm512_load_ps(r.boundary)),
        slope0(_mm512_load_ps(r.slope)), slope1(_mm512_load_ps(r.slope + 16)), offset0(_mm512_load_ps(r.offset)),
        offset1(_mm512_load_ps(r.offset + 16)), last0(_mm512_load_ps(r.last)), last1(_mm512_load_ps(r.last + 16)),
        correction(_mm512_load_si512(r.correction)) {}

  /// The magnitudes of sixteen ordinals.
  LB_HD __m512 magnitude(__m512i m) const {
    const __m512i doubled = _mm512_add_epi32(_mm512_add_epi32(m, m), _mm512_set1_epi32(2 * kExtra + 1));
    const __m512i bits = _mm512_castps_si512(_mm512_cvtepi32_ps(doubled));
    const __m512i one = _mm512_set1_epi32(0x3f800000);
    // (bits & mantissa) | one
    const __m512i mantissa = _mm512_ternarylogic_epi32(bits, _mm512_set1_epi32(0x7fffff), one, 0xEA);
    const __m512 place = _mm512_sub_ps(_mm512_castsi512_ps(mantissa), _mm512_set1_ps(1.0f));
    const __m512i exponent = _mm512_srli_epi32(bits, 23);
    const __m512 v = _mm512_fmadd_ps(place, _mm512_permutexvar_ps(exponent, width), _mm512_permutexvar_ps(exponent, start));
    const __m512i pairs = _mm512_permutexvar_epi32(_mm512_srli_epi32(m, 4), correction);
    const __m512i shift = _mm512_and_si512(_mm512_add_epi32(m, m), _mm512_set1_epi32(31));
    const __m512i delta = _mm512_and_si512(_mm512_srlv_epi32(pairs, shift), _mm512_set1_epi32(3));
    const __m512i up = _mm512_add_epi32(_mm512_castps_si512(v), delta);
    return _mm512_castsi512_ps(_mm512_sub_epi32(up, _mm512_set1_epi32(1)));
  }

  /// The ordinals of sixteen a >= 0; *unsure marks the lanes to be asked of the scalar definition.
  LB_HD __m512i ordinal(__m512 a, __mmask16* unsure) const {
    a = _mm512_max_ps(a, _mm512_set1_ps(0x1p-30f));  // below every boundary of the signed map; the unsigned zero is the caller's
    const __m512i pair = _mm512_srli_epi32(_mm512_castps_si512(a), 24);
    const __m512 bound = _mm512_permutexvar_ps(pair, boundary);
    const __mmask16 above = _mm512_cmp_ps_mask(a, bound, _CMP_GE_OQ);
    const __m512i low = _mm512_and_si512(pair, _mm512_set1_epi32(15));
    const __m512i at = _mm512_mask_or_epi32(low, above, low, _mm512_set1_epi32(16));
    __m512 u = _mm512_fmadd_ps(a, _mm512_permutex2var_ps(slope0, at, slope1), _mm512_permutex2var_ps(offset0, at, offset1));
    u = _mm512_min_ps(u, _mm512_permutex2var_ps(last0, at, last1));
    const __m512 away = _mm512_abs_ps(_mm512_sub_ps(u, _mm512_roundscale_ps(u, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
    *unsure = _mm512_cmp_ps_mask(away, _mm512_set1_ps(Dynamic8Code<kExtra>::kUnsure), _CMP_LT_OQ) |
              _mm512_cmp_ps_mask(a, bound, _CMP_EQ_OQ);
    const __m512i m = _mm512_cvttps_epi32(u);
    return kExtra ? _mm512_max_epi32(m, _mm512_set1_epi32(1)) : m;
  }
};

LB_HD __mmask16 tail_mask(int n) { return static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << n) - 1u); }

/// out[i] = map(codes[i]) * scale
LB_HD void decode_block(Dynamic8, const uint8_t* codes, float scale, float* out, int n) {
  const Dynamic8Lanes<0> lanes(kDynamic8Registers);
  const __m512 scales = _mm512_set1_ps(scale);
  for (int i = 0; i < n; i += 16) {
    const __mmask16 mask = tail_mask(n - i);
    const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, codes + i));
    const __m512i k = _mm512_sub_epi32(code, _mm512_set1_epi32(127));
    const __m512i sign = _mm512_and_si512(k, _mm512_set1_epi32(static_cast<int>(0x80000000u)));
    const __m512 v = _mm512_or_ps(lanes.magnitude(_mm512_abs_epi32(k)), _mm512_castsi512_ps(sign));
    _mm512_mask_storeu_ps(out + i, mask, _mm512_mul_ps(v, scales));
  }
}

LB_HD void decode_block(Dynamic8Unsigned, const uint8_t* codes, float scale, float* out, int n) {
  const Dynamic8Lanes<1> lanes(kDynamic8UnsignedRegisters);
  const __m512 scales = _mm512_set1_ps(scale);
  for (int i = 0; i < n; i += 16) {
    const __mmask16 mask = tail_mask(n - i);
    const __m512i code = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, codes + i));
    _mm512_mask_storeu_ps(out + i, mask, _mm512_mul_ps(lanes.magnitude(code), scales));
  }
}

/// codes[i] = the code nearest to x[i] * inverse
LB_HD void encode_block(Dynamic8, const float* x, float inverse, uint8_t* codes, int n) {
  const Dynamic8Lanes<0> lanes(kDynamic8Registers);
  const __m512 inverses = _mm512_set1_ps(inverse);
  for (int i = 0; i < n; i += 16) {
    const __mmask16 mask = tail_mask(n - i);
    const __m512 z = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), inverses);
    __mmask16 unsure;
    const __m512i m = lanes.ordinal(_mm512_abs_ps(z), &unsure);
    const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(z));
    const __m512i center = _mm512_set1_epi32(127);
    __m512i code = _mm512_add_epi32(center, m);
    code = _mm512_mask_sub_epi32(code, negative, center, m);
    code = _mm512_max_epi32(code, _mm512_setzero_si512());
    _mm_mask_storeu_epi8(codes + i, mask, _mm512_cvtepi32_epi8(code));
    for (unsigned left = unsure & mask; left != 0; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      codes[i + lane] = static_cast<uint8_t>(Dynamic8::encode(x[i + lane] * inverse));
    }
  }
}

LB_HD void encode_block(Dynamic8Unsigned, const float* x, float inverse, uint8_t* codes, int n) {
  const Dynamic8Lanes<1> lanes(kDynamic8UnsignedRegisters);
  const __m512 inverses = _mm512_set1_ps(inverse);
  for (int i = 0; i < n; i += 16) {
    const __mmask16 mask = tail_mask(n - i);
    const __m512 z = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), inverses);
    __mmask16 unsure;
    const __m512i m = lanes.ordinal(z, &unsure);
    const __mmask16 positive = _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_GT_OQ);
    _mm_mask_storeu_epi8(codes + i, mask, _mm512_cvtepi32_epi8(_mm512_maskz_mov_epi32(positive, m)));
    for (unsigned left = unsure & positive & mask; left != 0; left &= left - 1) {
      const int lane = __builtin_ctz(left);
      codes[i + lane] = static_cast<uint8_t>(Dynamic8Unsigned::encode(x[i + lane] * inverse));
    }
  }
}

}  // namespace lowbit
