// The encoder of dynamic8_plain.h, eight values at a time: the number of thresholds reached picks
// the line from registers of eight.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "core/state/dynamic8_plain.h"

namespace lowbit {

template <class Format>
struct Dynamic8EncoderAvx2 {
  static constexpr int kExtra = Format::kSigned ? 0 : 1;
  static constexpr const Dynamic8Lines8<kExtra>& lines() {
    if constexpr (kExtra) {
      return kDynamic8UnsignedLines;
    } else {
      return kDynamic8Lines;
    }
  }
  __m256 inverse, slope, offset, last;

  LB_HD explicit Dynamic8EncoderAvx2(float i)
      : inverse(_mm256_set1_ps(i)),
        slope(row(lines().slope)),
        offset(row(lines().offset)),
        last(row(lines().last)) {}

  /// 127 - code (signed) or the code (unsigned) of eight values; *middle: how far the line is from
  /// the middle of two integers.
  LB_HD __m256i operator()(const float* x, __m256* middle) const {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const __m256 z = _mm256_mul_ps(_mm256_loadu_ps(x), inverse);
    __m256 a;
    __m256i key;
    if constexpr (Format::kSigned) {
      a = _mm256_andnot_ps(sign, z);
      const __m256i twice = _mm256_add_epi32(_mm256_castps_si256(a), _mm256_castps_si256(a));
      key = _mm256_add_epi32(_mm256_sub_epi32(twice, _mm256_set1_epi32(-1)),
                             _mm256_srai_epi32(_mm256_castps_si256(z), 31));
    } else {
      a = _mm256_max_ps(z, _mm256_setzero_ps());
      key = _mm256_castps_si256(a);
    }
    __m256i line = _mm256_setzero_si256();
    for (int i = 1; i < lines().kLines; ++i) {
      line = _mm256_sub_epi32(line,
                              _mm256_cmpgt_epi32(key, _mm256_set1_epi32(lines().threshold[i] - 1)));
    }
    __m256 u = _mm256_fmadd_ps(a, _mm256_permutevar8x32_ps(slope, line),
                               _mm256_permutevar8x32_ps(offset, line));
    u = _mm256_min_ps(u, _mm256_permutevar8x32_ps(last, line));
    const __m256 whole = _mm256_round_ps(u, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    // |u - whole - 1/2| is one half next to an integer.
    *middle = _mm256_andnot_ps(sign, _mm256_sub_ps(_mm256_sub_ps(u, whole), _mm256_set1_ps(0.5f)));
    const __m256i m = _mm256_cvttps_epi32(u);
    if constexpr (Format::kSigned) {
      // Negated, so that the one code that does not exist is where packing with signed saturation
      // stops.
      const __m256i s = _mm256_srai_epi32(_mm256_castps_si256(z), 31);
      return _mm256_sub_epi32(s, _mm256_xor_si256(m, s));  // -m where z >= 0, m where z < 0
    } else {
      return _mm256_and_si256(
          m, _mm256_castps_si256(_mm256_cmp_ps(z, _mm256_setzero_ps(), _CMP_GT_OQ)));
    }
  }

 private:
  LB_HD static __m256 row(const uint32_t* bits) {
    return _mm256_castsi256_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(bits)));
  }
};

template <class Format>
LB_HD void encode32(const Dynamic8EncoderAvx2<Format>& encoder, const float* x, float inverse,
                    uint8_t* codes) {
  __m256i m[4];
  __m256 middle[4];
  for (int j = 0; j < 4; ++j) m[j] = encoder(x + 8 * j, &middle[j]);
  const __m256i low = _mm256_packs_epi32(m[0], m[1]), high = _mm256_packs_epi32(m[2], m[3]);
  __m256i bytes;
  if constexpr (Format::kSigned) {
    bytes = _mm256_sub_epi8(_mm256_set1_epi8(127), _mm256_packs_epi16(low, high));
  } else {
    bytes = _mm256_packus_epi16(low, high);
  }
  // Packing works inside lanes; here the lanes' fours of bytes return to order.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(bytes, order));
  const __m256 sure = _mm256_set1_ps(0.5f - Format::kUnsure);
  const __m256 most =
      _mm256_max_ps(_mm256_max_ps(middle[0], middle[1]), _mm256_max_ps(middle[2], middle[3]));
  if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(most, sure, _CMP_GT_OQ)) == 0, 1)) return;
  for (int j = 0; j < 4; ++j) {
    unsigned left =
        static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(middle[j], sure, _CMP_GT_OQ)));
    for (; left != 0; left &= left - 1) {
      const int i = 8 * j + __builtin_ctz(left);
      codes[i] = static_cast<uint8_t>(Format::encode(x[i] * inverse));
    }
  }
}

template <class Format>
LB_HD void encode_avx2(const float* x, float inverse, uint8_t* codes, int n) {
  const Dynamic8EncoderAvx2<Format> encoder(inverse);
  int i = 0;
  for (; i + 32 <= n; i += 32) encode32<Format>(encoder, x + i, inverse, codes + i);
  if (i < n) encode_turns<Format>(x + i, inverse, codes + i, n - i);
}

LB_HD void encode_block(Dynamic8, const float* x, const BlockScale& s, uint8_t* codes, int n) {
  encode_avx2<Dynamic8>(x, s.inverse, codes, n);
}
LB_HD void encode_block(Dynamic8Unsigned, const float* x, const BlockScale& s, uint8_t* codes,
                        int n) {
  encode_avx2<Dynamic8Unsigned>(x, s.inverse, codes, n);
}

}  // namespace lowbit
