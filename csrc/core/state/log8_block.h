// log8.h over many values, with the same codes and values, where products and sums can be fused.
//
// quantize: the code needs log2 to a small part of a step only. A short polynomial with fused
// operations gives the position in steps of 2^-16; a value whose lower bits are within the error of a
// rounding boundary, about one in 5000, is asked of the definition.
//
// dequantize: the definition's operations one by one, because every bit of the value counts. Two of
// them are shorter: one instruction scales by a power of two (AVX-512), or one factor does where all
// values of the block are normal.
//
// Included by log8.h, at its end, and by nothing else.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace lowbit {

/// A scale as a line: position = (log2 a - whole - part) * inverse, in steps from the lowest code.
struct LogLine {
  float whole, part, inverse;
};
LB_HD LogLine log_line(const FixedLogScale& s) { return {-126.0f, 0.0f, s.inverse}; }
template <int kSteps, bool kWithSign, int kRange>
LB_HD LogLine log_line(const AdaptiveLogScale<kSteps, kWithSign, kRange>& s) {
  return {s.whole, s.part, s.inverse};
}

template <class F>
concept IsLog8 = __is_same(F, Log8) || __is_same(F, Log8Fixed) || __is_same(F, Log8Signed);

/// The error of log2_short, above the definition's own.
constexpr float kLog2Short = 2.4e-6f;
/// Blocks whose values are unsure more often than this, of 65536, are left to the definition. They
/// span less than about two thirds of an octave.
constexpr float kMaxUnsure = 128.0f;
LB_HD float log_unsure(float inverse) { return 8.0f + 2.0f * kLog2Short * 65536.0f * inverse; }

/// Codes of a block with unsure <= kMaxUnsure.
template <class F>
__attribute__((noinline)) static void log_quantize(const float* x, const typename F::Scale& scale,
                                                   uint8_t* codes, int n) {
  constexpr int kTurn = 64;
  constexpr uint32_t kRootHalf = 0x3f3504f3u;
  constexpr bool kFixed = __is_same(F, Log8Fixed);
  constexpr int kMiddle = 0x8000, kTop = F::kSigned ? 126 : kFixed ? 255 : 254;
  const LogLine line = log_line(scale);
  const auto window = static_cast<int32_t>(log_unsure(line.inverse));
  const float steps = line.inverse * 65536.0f;
  const float offset = static_cast<float>(kMiddle + window / 2);
  const float zero = offset - steps;  // one octave below the lowest code, signed values become zero
  for (int i = 0; i < n; i += kTurn) {
    const int count = n - i < kTurn ? n - i : kTurn;
    alignas(64) float some[kTurn] = {};
    const float* in = x + i;
    if (count < kTurn) {
      std::memcpy(some, in, static_cast<size_t>(count) * sizeof(float));
      in = some;
    }
    alignas(64) int32_t code[kTurn], low[kTurn];
    for (int j = 0; j < kTurn; ++j) {
      float a = F::kSigned ? bits_float(magnitude_bits(in[j])) : in[j];
      a = a > 0x1p-126f ? a : 0x1p-126f;
      a = a < 0x1p126f ? a : 0x1p126f;
      const uint32_t bits = float_bits(a);
      const int32_t e = static_cast<int32_t>(bits - kRootHalf) >> 23;
      const float f = bits_float(bits - (static_cast<uint32_t>(e) << 23)) - 1.0f;
      float p = -0x1.a716dcp-3f;
      p = __builtin_fmaf(p, f, 0x1.49e298p-2f);
      p = __builtin_fmaf(p, f, -0x1.784f7ep-2f);
      p = __builtin_fmaf(p, f, 0x1.eada3ep-2f);
      p = __builtin_fmaf(p, f, -0x1.713830p-1f);
      p = __builtin_fmaf(p, f, 0x1.7155acp+0f);
      const float above = __builtin_fmaf(p, f, -line.part);
      const float y = __builtin_fmaf(static_cast<float>(e) - line.whole, steps,
                                     __builtin_fmaf(above, steps, offset));
      float limited = y < kTop * 65536.0f + kMiddle ? y : kTop * 65536.0f + kMiddle;
      limited = limited > kMiddle ? limited : kMiddle;
      const auto k = static_cast<int32_t>(limited);
      low[j] = k & 0xffff;
      if constexpr (F::kSigned) {
        const float from_zero = bits_float(magnitude_bits(y - zero));
        const int32_t unsure = from_zero < static_cast<float>(window) ? 0 : 0xffff;
        low[j] = low[j] < unsure ? low[j] : unsure;
        const auto coded = static_cast<int32_t>(in[j] != 0.0f) & static_cast<int32_t>(y >= zero);
        const int32_t ordinal = ((k >> 16) + 1) & -coded;
        const int32_t sign = static_cast<int32_t>(float_bits(in[j])) >> 31;
        code[j] = 128 + ((ordinal ^ sign) - sign);
      } else if constexpr (kFixed) {
        code[j] = k >> 16;
      } else {
        code[j] = in[j] > 0.0f ? (k >> 16) + 1 : 0;
      }
    }
    int32_t unsure = 0;
    for (int j = 0; j < kTurn; ++j) unsure |= low[j] - window;  // negative where it is less
    alignas(64) uint8_t bytes[kTurn];
    for (int j = 0; j < kTurn; ++j) bytes[j] = static_cast<uint8_t>(code[j]);
    for (int j = 0; unsure < 0 && j < kTurn; ++j) {
      if (low[j] < window) bytes[j] = static_cast<uint8_t>(F::quantize(scale.to_z(in[j])));
    }
    std::memcpy(codes + i, bytes, static_cast<size_t>(count));
  }
}

template <class F>
__attribute__((noinline)) static void log_quantize_exactly(const float* x,
                                                           const typename F::Scale& given,
                                                           uint8_t* codes, int n) {
  const typename F::Scale scale = given;
  for (int i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(F::quantize(scale.to_z(x[i])));
}

template <class F>
  requires IsLog8<F>
LB_HD void quantize_block(F, const float* x, const typename F::Scale& scale, uint8_t* codes,
                          int n) {
  if (log_unsure(scale.inverse) <= kMaxUnsure) {
    log_quantize<F>(x, scale, codes, n);
  } else {
    log_quantize_exactly<F>(x, scale, codes, n);
  }
}

#if defined(__AVX512F__)

/// scale.from_z(F::dequantize(code)) for codes 0, 1, ... of a sign and a magnitude.
template <class F>
LB_HD __m512 log_value(__m512i code, const typename F::Scale& scale) {
  constexpr bool kFixed = __is_same(F, Log8Fixed);
  const auto all = [](float v) { return _mm512_set1_ps(v); };
  __m512i sign = _mm512_setzero_si512();
  if constexpr (F::kSigned) {
    code = _mm512_sub_epi32(code, _mm512_set1_epi32(128));
    sign = _mm512_and_si512(code, _mm512_set1_epi32(static_cast<int>(0x80000000u)));
    code = _mm512_min_epi32(_mm512_abs_epi32(code), _mm512_set1_epi32(127));
  }
  const __m512 a = _mm512_cvtepi32_ps(code);
  const LogLine line = log_line(scale);
  const __m512 y = kFixed
                       ? _mm512_mul_ps(a, all(scale.step))
                       : _mm512_add_ps(_mm512_mul_ps(_mm512_sub_ps(a, all(1.0f)), all(scale.step)),
                                       all(line.part));
  const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(y, n);
  __m512 p = all(0x1.442d42p-13f);
  constexpr float kFactors[5] = {0x1.5f17fap-10f, 0x1.3b2a42p-7f, 0x1.c6af68p-5f, 0x1.ebfbe0p-3f,
                                 0x1.62e430p-1f};
  for (const float c : kFactors) p = _mm512_add_ps(_mm512_mul_ps(p, f), all(c));
  const __m512 mantissa = _mm512_add_ps(all(1.0f), _mm512_mul_ps(p, f));
  const __m512 value = _mm512_scalef_ps(mantissa, _mm512_add_ps(n, all(line.whole)));
  if constexpr (kFixed) return value;
  const __mmask16 coded = _mm512_test_epi32_mask(code, code);
  // NaN if the scale is NaN.
  const __m512 x = _mm512_mask_blend_ps(coded, all(scale.step * 0.0f), value);
  return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), sign));
}

template <class F>
  requires IsLog8<F>
LB_HD void dequantize_block(F, const uint8_t* codes, const typename F::Scale& given, float* out,
                            int n) {
  const typename F::Scale scale = given;
  // Scales that no block has, and NaN: by the definition, whose exponents then wrap around.
  float lowest = -126.0f;
  if constexpr (!__is_same(F, Log8Fixed)) lowest = scale.lowest;
  const bool usual = scale.range > 0.0f && scale.range < 256.0f && lowest > -128.0f &&
                     lowest + scale.range < 128.0f;
  if (!usual) {
    for (int i = 0; i < n; ++i) out[i] = scale.from_z(F::dequantize(codes[i]));
    return;
  }
  for (int i = 0; i < n; i += 16) {
    const auto some = static_cast<__mmask16>(n - i < 16 ? (1 << (n - i)) - 1 : 0xffff);
    const __m128i bytes = _mm512_castsi512_si128(_mm512_maskz_loadu_epi8(some, codes + i));
    _mm512_mask_storeu_ps(out + i, some, log_value<F>(_mm512_cvtepu8_epi32(bytes), scale));
  }
}

#endif

}  // namespace lowbit
