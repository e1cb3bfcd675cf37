// dynamic8.h's quantizer, eight values to a register. Eight lines slope * |z| + offset cover all
// values. Two neighbouring binades hold at most one threshold between lines: so the halved exponent
// names a line, by a lookup of bytes, or the one before it, and one comparison tells. The line
// gives ordinals in steps of 2^-16, so that the code is the upper half of a word and what is unsure
// its lower half; the scalar definition is asked there, about once in 2000 values.
//
// Included by dynamic8_plain.h, at its end, and by nothing else.
#pragma once

#include <immintrin.h>

#include "core/state/chance/chance_vector.h"
#include "core/state/turns.h"
#include "core/vector_avx2.h"

namespace lowbit {

template <int kUnsigned>
struct Dynamic8Lines8 {
  using Tables = Dynamic8Tables<kUnsigned>;
  static constexpr int kLines = 8;
  // Bits of floats.
  alignas(32) uint32_t slope[kLines] = {}, offset[kLines] = {}, last[kLines] = {};
  int32_t threshold[kLines] = {};  // keys, for this line and those above

  LB_HD static constexpr int32_t key(uint32_t magnitude, bool positive) {
    return static_cast<int32_t>(Dynamic8Steps<kUnsigned>::key(magnitude, positive));
  }

  constexpr explicit Dynamic8Lines8(const Tables& t) {
    // Zero and one, or one and two, meet at their middle, halfway up from the start of the line.
    const float middle = kUnsigned ? (t.magnitude[1] + t.magnitude[2]) / 2.0f : t.from[0];
    set(0, 0.5f / middle, kUnsigned + 0.5f, static_cast<float>(t.last[0]) + 0.5f);
    for (int i = 1; i < Tables::kDecades; ++i)
      set(i, t.slope[i], t.offset[i], static_cast<float>(t.last[i]) + 0.5f);
    set(Tables::kDecades, 0.0f, Tables::kTop + 0.5f, Tables::kTop + 0.5f);
    for (int i = 1; i < kLines; ++i) {
      const int below = i < Tables::kDecades ? t.last[i - 1] : Tables::kTop - 1;
      const bool tie =
          2.0 * t.from[i] == static_cast<double>(t.magnitude[below]) + t.magnitude[below + 1];
      threshold[i] = key(float_bits(t.from[i]), tie);
    }
  }

 private:
  constexpr void set(int i, float s, float o, float l) {
    slope[i] = float_bits(s), offset[i] = float_bits(o), last[i] = float_bits(l);
  }
};

constexpr Dynamic8Lines8<0> kDynamic8Lines{Dynamic8Tables<0>{}};
constexpr Dynamic8Lines8<1> kDynamic8UnsignedLines{Dynamic8Tables<1>{}};

template <int kUnsigned>
struct Dynamic8Halves8 : Dynamic8Steps<kUnsigned> {
  using Steps = Dynamic8Steps<kUnsigned>;
  using Lines = Dynamic8Lines8<kUnsigned>;
  static constexpr int kLines = Lines::kLines;
  static constexpr float kMin = 0x1p-29f;  // the lower end of kLowest
  alignas(16) uint8_t begins[16] = {};  // the line at the start of exponent / 2, indexed by 4 bits
  alignas(32) int32_t below[kLines] = {};  // the largest key of a line; signed ones minus one
  alignas(32) float slope[kLines] = {}, offset[kLines] = {}, last[kLines] = {};

  constexpr explicit Dynamic8Halves8(const Lines& lines) {
    // Unsigned lines include the rounding offset. Signed ones stay ordinals, so that a sign can
    // negate them.
    const float more = kUnsigned ? Steps::kRound - 32768 : -32768;
    for (int i = 0; i < kLines; ++i) {
      below[i] = i + 1 < kLines ? lines.threshold[i + 1] - 2 + kUnsigned : 0x7fffffff;
      slope[i] = bits_float(lines.slope[i]) * Steps::kOne;
      offset[i] = bits_float(lines.offset[i]) * Steps::kOne + more;
      last[i] = bits_float(lines.last[i]) * Steps::kOne + more;
    }
    for (uint32_t e = Steps::kLowest; e < 64; ++e) {
      const auto key = static_cast<int32_t>(e << Steps::kShift);
      for (int i = 1; i < kLines; ++i) begins[e & 15] += key >= lines.threshold[i];
    }
  }
};
constexpr Dynamic8Halves8<0> kDynamic8Halves{kDynamic8Lines};
constexpr Dynamic8Halves8<1> kDynamic8UnsignedHalves{kDynamic8UnsignedLines};

template <class Format>
struct Dynamic8QuantizerAvx2 {
  static constexpr int kUnsigned = Format::kSigned ? 0 : 1;
  using Halves = Dynamic8Halves8<kUnsigned>;
  static constexpr const Halves& halves() {
    if constexpr (kUnsigned) {
      return kDynamic8UnsignedHalves;
    } else {
      return kDynamic8Halves;
    }
  }
  __m256 inverse, slope, offset, last;
  __m256i begins, below;

  LB_HD explicit Dynamic8QuantizerAvx2(float i)
      : inverse(_mm256_set1_ps(i)),
        slope(_mm256_load_ps(halves().slope)),
        offset(_mm256_load_ps(halves().offset)),
        last(_mm256_load_ps(halves().last)),
        begins(_mm256_broadcastsi128_si256(
            _mm_load_si128(reinterpret_cast<const __m128i*>(halves().begins)))),
        below(_mm256_load_si256(reinterpret_cast<const __m256i*>(halves().below))) {}

  /// Codes of eight values in steps of 2^-16. Packing turns the nonexistent code -1 to 0.
  LB_HD __m256i operator()(const float* x) const {
    const __m256 z = _mm256_mul_ps(_mm256_loadu_ps(x), inverse);
    const __m256i bits = _mm256_castps_si256(z);
    // Values below the lowest binades get the code of these.
    const __m256 lowest = _mm256_set1_ps(Halves::kMin);
    const __m256 a =
        _mm256_max_ps(Format::kSigned ? _mm256_andnot_ps(_mm256_set1_ps(-0.0f), z) : z, lowest);
    // The first byte of a value is half its exponent; the shift drops the lookups of the other
    // bytes.
    __m256i line = _mm256_srli_epi32(_mm256_shuffle_epi8(begins, _mm256_castps_si256(a)), 24);
    __m256i key = bits;
    if constexpr (Format::kSigned)  // twice the magnitude, minus one if z is negative
      key = _mm256_add_epi32(_mm256_add_epi32(bits, bits), _mm256_srai_epi32(bits, 31));
    line =
        _mm256_sub_epi32(line, _mm256_cmpgt_epi32(key, _mm256_permutevar8x32_epi32(below, line)));
    __m256 u = _mm256_fmadd_ps(a, _mm256_permutevar8x32_ps(slope, line),
                               _mm256_permutevar8x32_ps(offset, line));
    u = _mm256_min_ps(u, _mm256_permutevar8x32_ps(last, line));
    const __m256i k = _mm256_cvtps_epi32(u);
    if constexpr (Format::kSigned) {
      return _mm256_add_epi32(_mm256_sign_epi32(k, bits), all((127 << 16) + Halves::kRound));
    } else {
      const __m256 positive = _mm256_cmp_ps(z, _mm256_setzero_ps(), _CMP_GT_OQ);
      return _mm256_castps_si256(
          _mm256_blendv_ps(_mm256_castsi256_ps(all(1 << 15)), _mm256_castsi256_ps(k), positive));
    }
  }
  LB_HD static __m256i all(int x) { return _mm256_set1_epi32(x); }
};

template <class Format>
LB_HD void quantize32(const Dynamic8QuantizerAvx2<Format>& quantizer, const float* x, float inverse,
                      uint8_t* codes) {
  using Halves = typename Dynamic8QuantizerAvx2<Format>::Halves;
  __m256i k[4];
  for (int j = 0; j < 4; ++j) k[j] = quantizer(x + 8 * j);
  Vector::store_upper(k, codes);
  define_unsure<Vector, Halves::kUnsure>(k, [&](int i) LB_LAMBDA {
    codes[i] = static_cast<uint8_t>(Format::quantize(x[i] * inverse));
  });
}

template <class Format>
LB_HD void quantize_avx2(const float* x, float inverse, uint8_t* codes, int n) {
  const Dynamic8QuantizerAvx2<Format> quantizer(inverse);
  in_turns<32>(x, codes, n, [&](const float* some, uint8_t* out) LB_LAMBDA {
    quantize32<Format>(quantizer, some, inverse, out);
  });
}

LB_HD void quantize_block(Dynamic8, const float* x, const BlockScale& s, uint8_t* codes, int n) {
  quantize_avx2<Dynamic8>(x, s.inverse, codes, n);
}
LB_HD void quantize_block(Dynamic8Unsigned, const float* x, const BlockScale& s, uint8_t* codes,
                          int n) {
  quantize_avx2<Dynamic8Unsigned>(x, s.inverse, codes, n);
}

}  // namespace lowbit

#include "core/state/chance/dynamic8_chance_avx2.h"
