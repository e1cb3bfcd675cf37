// dynamic8_chance.h, eight values to a register.
//
// Included by dynamic8_avx2.h, at its end, and by nothing else.
#pragma once

#include <immintrin.h>

#include "core/state/chance/dynamic8_chance.h"

namespace lowbit {

/// The segments as in Dynamic8Halves8: a lookup of bytes by half the exponent, and one comparison.
template <int kUnsigned>
struct Dynamic8ChanceHalves {
  using Positions = Dynamic8Positions<kUnsigned>;
  alignas(16) uint8_t begins[16] = {};
  alignas(32) int32_t below[Positions::kSegments] = {};  // the largest key of a segment
  Positions lines;

  constexpr explicit Dynamic8ChanceHalves(const Positions& p) : lines(p) {
    for (int i = 0; i < Positions::kSegments; ++i)
      below[i] = i < 7 ? static_cast<int32_t>(float_bits(p.from[i + 1])) - 1 : 0x7fffffff;
    for (uint32_t e = Dynamic8Steps<kUnsigned>::kLowest; e < 64; ++e)
      begins[e & 15] = static_cast<uint8_t>(segment_at(p, e));
  }
};
constexpr Dynamic8ChanceHalves<0> kDynamic8Chance{kDynamic8Positions};
constexpr Dynamic8ChanceHalves<1> kDynamic8UnsignedChance{kDynamic8UnsignedPositions};

template <class Format>
struct Dynamic8ByChanceAvx2 {
  static constexpr int kUnsigned = Format::kSigned ? 0 : 1;
  static constexpr int kUnsure = Dynamic8Positions<kUnsigned>::kUnsure;
  static constexpr const Dynamic8ChanceHalves<kUnsigned>& halves() {
    if constexpr (kUnsigned) {
      return kDynamic8UnsignedChance;
    } else {
      return kDynamic8Chance;
    }
  }
  LB_HD static __m256i all(int x) { return _mm256_set1_epi32(x); }
  LB_HD static __m256 line(const float* of, __m256i at) {
    return _mm256_permutevar8x32_ps(_mm256_loadu_ps(of), at);
  }
  __m256 inverse;
  __m256i begins = _mm256_broadcastsi128_si256(
      _mm_load_si128(reinterpret_cast<const __m128i*>(halves().begins)));

  LB_HD explicit Dynamic8ByChanceAvx2(float i) : inverse(_mm256_set1_ps(i)) {}

  /// The sum of position and chance of eight values. A value is unsure where the lower half of
  /// `least` is below kUnsure.
  LB_HD __m256i operator()(const float* x, const uint16_t* random16, __m256i& least) const {
    const auto& h = halves();
    const __m256 z = _mm256_mul_ps(_mm256_loadu_ps(x), inverse);
    const __m256 absolute = _mm256_castsi256_ps(all(0x7fffffff));
    const __m256 a = Format::kSigned ? _mm256_and_ps(z, absolute) : z;
    const __m256 limited = _mm256_max_ps(a, _mm256_set1_ps(0x1p-29f));
    __m256i at = _mm256_srli_epi32(_mm256_shuffle_epi8(begins, _mm256_castps_si256(limited)), 24);
    const __m256i below = _mm256_permutevar8x32_epi32(
        _mm256_load_si256(reinterpret_cast<const __m256i*>(h.below)), at);
    at = _mm256_sub_epi32(at, _mm256_cmpgt_epi32(_mm256_castps_si256(a), below));
    const __m256 inside =
        _mm256_fmadd_ps(a, line(h.lines.inside_slope, at), line(h.lines.inside_offset, at));
    const __m256 after =
        _mm256_fmadd_ps(a, line(h.lines.after_slope, at), line(h.lines.after_offset, at));
    __m256 u = _mm256_min_ps(inside, after);
    __m256i k;
    if constexpr (Format::kSigned) {  // the code -1, which does not exist, is packed as 0
      k = _mm256_cvtps_epi32(_mm256_or_ps(u, _mm256_andnot_ps(absolute, z)));
      k = _mm256_add_epi32(k, all(127 << 16));
    } else {  // a positive value never becomes zero
      u = _mm256_and_ps(_mm256_max_ps(u, _mm256_set1_ps(65536.0f)),
                        _mm256_cmp_ps(z, _mm256_setzero_ps(), _CMP_GT_OQ));
      k = _mm256_cvtps_epi32(u);
    }
    return add_chance<kUnsure, Vector>(k, k, random16, least);
  }
};

template <class Format>
LB_HD void quantize32_by_chance(const Dynamic8ByChanceAvx2<Format>& quantizer, const float* x,
                                float inverse, const uint16_t* random16, uint8_t* codes) {
  __m256i least[4], sum[4];
  for (int j = 0; j < 4; ++j) sum[j] = quantizer(x + 8 * j, random16 + 8 * j, least[j]);
  Vector::store_upper(sum, codes);
  define_unsure<Vector, Dynamic8ByChanceAvx2<Format>::kUnsure>(least, [&](int i) LB_LAMBDA {
    codes[i] = dynamic8_by_chance<Format>(x[i], inverse, random16[i]);
  });
}

template <class Format>
  requires __is_same
(Format, Dynamic8) || __is_same(Format, Dynamic8Unsigned) LB_HD
    void quantize_block_by_chance(Format, const float* x, const BlockScale& s,
                                  const uint16_t* random16, uint8_t* codes, int n) {
  const Dynamic8ByChanceAvx2<Format> quantizer(s.inverse);
  in_turns<32>(x, random16, codes, n,
               [&](const float* some, const uint16_t* chance, uint8_t* out) LB_LAMBDA {
                 quantize32_by_chance<Format>(quantizer, some, s.inverse, chance, out);
               });
}

}  // namespace lowbit
