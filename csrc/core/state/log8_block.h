// log8.h in vectors, with the same codes and values.
//
// quantize: the code needs log2 to a small part of a step only. A short polynomial with fused
// operations gives the position in steps of 2^-16; a value whose position is within its error of
// where the code changes, about one in 5000, is asked of the definition.
//
// Stochastic codes: values of neighbours are an octave / inverse apart. With S = log 2 / inverse,
// the share of the way from one to the next is (e^(S f) - 1) / (e^S - 1) at the part f of a
// position. Five terms of the series are within a step for S up to 0.4.
//
// dequantize: the definition's operations one by one, because every bit of the value counts.
// Scaling by a power of two is shorter.
//
// Included by log8.h, at its end, and by nothing else.
#pragma once

#include "core/state/chance/chance_vector.h"
#include "core/state/chance/stochastic.h"
#include "core/state/turns.h"
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include "core/vector_avx512.h"
#else
#include "core/vector_avx2.h"
#endif

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

/// The error of the short polynomial, above the definition's own.
constexpr float kLog2Short = 2.4e-6f;
/// Blocks whose values are unsure more often than this, of 65536, are left to the definition. They
/// span less than about two thirds of an octave.
constexpr float kMaxUnsure = 128.0f;
LB_HD float log_unsure(float inverse) { return 8.0f + 2.0f * kLog2Short * 65536.0f * inverse; }
/// The same for stochastic codes. A share errs up to 1.2 times as much as the position, and the
/// definition's difference of two values has an error of its own.
LB_HD float chance_unsure(float inverse) { return 2.0f * log_unsure(inverse); }

/// Codes of a block, kTurn at a time. Positions count from code 0 for a zero, or the lowest code.
/// Those for nearest codes have added a half and half the width in which they are unsure.
template <class F, bool kByChance>
struct LogVectors {
  using V = Vector;
  using Float = V::Float;
  using Int = V::Int;
  static constexpr bool kFixed = __is_same(F, Log8Fixed);
  static constexpr int kTurn = 4 * V::kLanes;
  static constexpr float kStep = 65536.0f;
  static constexpr float kFirst = kFixed ? 0.0f : 1.0f, kLast = F::kSigned ? 127.0f : 255.0f;

  Int exponent, window, past_zero, half_window, past_middle;
  Float steps, offset, lowest, highest, none, zero;
  Float share[5];

  /// Whether a block's codes are found this way. Subnormal values count as 2^-126: that has to be
  /// the lowest code or less, and signed values that far below must be zeros.
  LB_HD static bool fits(const typename F::Scale& scale) {
    const LogLine line = log_line(scale);
    if (line.whole + line.part < (F::kSigned ? -124.0f : -126.0f)) return false;
    if (kByChance) return line.inverse >= 1.75f && chance_unsure(line.inverse) <= kMaxUnsure;
    return log_unsure(line.inverse) <= kMaxUnsure;
  }

  LB_HD explicit LogVectors(const typename F::Scale& scale) {
    const LogLine line = log_line(scale);
    const auto wide =
        static_cast<int>(kByChance ? chance_unsure(line.inverse) : log_unsure(line.inverse));
    const auto half = static_cast<float>(wide / 2);
    const float per_octave = line.inverse * kStep;
    const float first = kFirst * kStep + (kByChance ? 0.0f : 0.5f * kStep + half);
    const float clamped = kByChance ? 0.0f : 0.5f * kStep;  // far from where codes change
    exponent = V::all_words(0x4afb0d - ((static_cast<int>(line.whole) + 127) << 23));
    window = V::all_words(wide), half_window = V::all_words(wide / 2);
    past_middle = V::all_words(0x8000 + wide / 2);
    steps = V::all(per_octave), offset = V::all(first - line.part * per_octave);
    lowest = V::all(kFirst * kStep + clamped), highest = V::all(kLast * kStep + clamped);
    none = V::all(clamped);
    zero = V::all(first - per_octave);
    past_zero = V::all_words(wide / 2 - to_integer(first - per_octave));
    if constexpr (kByChance) {
      const float s = 0.6931471806f / line.inverse;
      const float t[5] = {s, s * s * (1.0f / 2), s * s * s * (1.0f / 6),
                          s * s * s * s * (1.0f / 24), s * s * s * s * s * (1.0f / 120)};
      const float whole = 1.0f / (t[0] + (t[1] + (t[2] + (t[3] + t[4]))));
      float unit = whole;
      for (int i = 0; i < 5; ++i) share[i] = V::all(t[i] * unit), unit *= 1.0f / kStep;
      share[0] = V::all(t[0] * whole - 1.0f);  // what is beyond the position's own part
    }
  }

  /// The position of a magnitude. Those below 2^-126 lie at most an octave below it.
  LB_HD Float position(Float a) const {
    const Int t = V::plus(V::bits(a), exponent);  // mantissas lie in [sqrt(1/2), sqrt(2))
    const Float e = V::to_float(V::template down_signed<23>(t));
    const Int mantissa = V::plus(V::both(t, V::all_words(0x7fffff)), V::all_words(0x3f3504f3));
    const Float f = V::minus(V::floats(mantissa), V::all(1.0f));
    Float p = V::all(-0x1.a716dcp-3f);
    constexpr float kFactors[5] = {0x1.49e298p-2f, -0x1.784f7ep-2f, 0x1.eada3ep-2f, -0x1.713830p-1f,
                                   0x1.7155acp+0f};
    for (const float c : kFactors) p = V::plus_product(p, f, V::all(c));
    return V::plus_product(e, steps, V::plus_product(p, V::times(f, steps), offset));
  }

  /// Codes in the upper halves of words. A value is unsure where the lower half of `least` is below
  /// `window`.
  LB_HD Int codes_of(const float* in, const uint16_t* random16, Int& least) const {
    const Float x = V::load(in);
    const Float y = position(F::kSigned ? V::magnitude(x) : V::larger(x, V::all(0.0f)));
    Float floor = lowest;
    if constexpr (F::kSigned) floor = V::choose(V::at_least(y, zero), none, lowest);
    if constexpr (!F::kSigned && !kFixed)
      floor = V::plus(none, V::where_positive(x, V::all(kStep)));
    // The definition takes code 0 for a zero, which stochastic codes never go down to.
    if constexpr (kFixed && kByChance)
      floor = V::choose(V::at_least(y, V::plus(lowest, V::all(0.5f * kStep))), lowest,
                        V::plus(lowest, V::all(kStep)));
    const Int k = V::rounded(V::smaller(V::larger(y, floor), highest));
    Int sum = k;
    if constexpr (kByChance) {
      const Float f = V::to_float(V::both(k, V::all_words(0xffff)));
      Float p = share[4];
      for (int i = 3; i >= 0; --i) p = V::plus_product(p, f, share[i]);
      const Int flipped =
          V::template flip_below<15>(k, V::load_chance(random16), V::all_words(0xffff));
      sum = V::plus(V::plus(k, V::rounded(V::times(p, f))), V::plus(flipped, half_window));
      const Int near = kFixed ? V::rounded(y) : k;
      least = V::smaller_halves(V::plus(near, past_middle), sum);
    } else {
      least = k;
    }
    if constexpr (!F::kSigned) return sum;
    least = V::smaller_halves(least, V::plus(V::rounded(y), past_zero));
    const Int whole = V::both(sum, V::all_words(static_cast<int>(0xffff0000u)));
    return V::plus(V::with_sign(whole, x), V::all_words(128 << 16));
  }

  template <class Define>
  LB_HD void turn(const float* x, const uint16_t* random16, uint8_t* codes,
                  const Define& define) const {
    Int code[4], least[4];
    for (int v = 0; v < 4; ++v)
      code[v] =
          codes_of(x + v * V::kLanes, kByChance ? random16 + v * V::kLanes : nullptr, least[v]);
    V::store_upper(code, codes);
    define_where<V>(
        least, [](Int a, Int b) LB_LAMBDA { return V::smaller_halves(a, b); },
        [&](Int a) LB_LAMBDA { return V::unsure(a, window); }, define);
  }
};

template <class F>
__attribute__((noinline)) static void log_quantize_exactly(const float* x,
                                                           const typename F::Scale& given,
                                                           uint8_t* codes, int n) {
  const typename F::Scale scale = given;
  for (int i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(F::quantize(scale.to_z(x[i])));
}

template <class F>
  requires IsLog8<F>
LB_HD void quantize_block(F, const float* x, const typename F::Scale& given, uint8_t* codes,
                          int n) {
  using Vectors = LogVectors<F, false>;
  if (!Vectors::fits(given)) return log_quantize_exactly<F>(x, given, codes, n);
  const typename F::Scale scale = given;
  const Vectors vectors(scale);
  in_turns<Vectors::kTurn>(x, codes, n, [&](const float* some, uint8_t* out) LB_LAMBDA {
    vectors.turn(some, nullptr, out, [&](int i) LB_LAMBDA {
      out[i] = static_cast<uint8_t>(F::quantize(scale.to_z(some[i])));
    });
  });
}

/// Whether quantize_block_by_chance takes a block. The others keep to the definition.
template <class F>
  requires IsLog8<F>
LB_HD bool by_chance_fits(F, const typename F::Scale& scale) {
  return LogVectors<F, true>::fits(scale);
}
template <class F>
  requires IsLog8<F>
LB_HD void quantize_block_by_chance(F, const float* x, const typename F::Scale& given,
                                    const uint16_t* random16, uint8_t* codes, int n) {
  using Vectors = LogVectors<F, true>;
  const typename F::Scale scale = given;
  const Vectors vectors(scale);
  in_turns<Vectors::kTurn>(
      x, random16, codes, n,
      [&](const float* some, const uint16_t* chance, uint8_t* out) LB_LAMBDA {
        vectors.turn(some, chance, out, [&](int i) LB_LAMBDA {
          out[i] = static_cast<uint8_t>(quantize_stochastic<F>(scale, some[i], chance[i]));
        });
      });
}

/// scale.from_z(F::dequantize(code)) of a scale without NaN.
template <class F>
LB_HD Vector::Float log_value(Vector::Int code, const typename F::Scale& scale) {
  using V = Vector;
  using Float = V::Float;
  constexpr bool kFixed = __is_same(F, Log8Fixed);
  const LogLine line = log_line(scale);
  Float z = V::to_float(F::kSigned ? V::minus(code, V::all_words(128)) : code), a = z;
  if constexpr (F::kSigned) a = V::smaller(V::magnitude(z), V::all(127.0f));
  Float y = V::times(kFixed ? a : V::minus(a, V::all(1.0f)), V::all(scale.step));
  if constexpr (!kFixed) y = V::plus(y, V::all(line.part));
  const Float n = V::nearest_integer(y), f = V::minus(y, n);
  Float p = V::all(0x1.442d42p-13f);
  constexpr float kFactors[5] = {0x1.5f17fap-10f, 0x1.3b2a42p-7f, 0x1.c6af68p-5f, 0x1.ebfbe0p-3f,
                                 0x1.62e430p-1f};
  for (const float c : kFactors) p = V::plus(V::times(p, f), V::all(c));
  const Float mantissa = V::plus(V::all(1.0f), V::times(p, f));
  const Float value = V::scaled(mantissa, V::plus(n, V::all(line.whole)));
  if constexpr (kFixed) return value;
  const Float x = V::where_positive(a, value);
  return F::kSigned ? V::signed_as(x, z) : x;
}

template <class F>
  requires IsLog8<F>
LB_HD void dequantize_block(F, const uint8_t* codes, const typename F::Scale& given, float* out,
                            int n) {
  using V = Vector;
  const typename F::Scale scale = given;
  // Scales that no block has, and NaN: by the definition, whose exponents then wrap around.
  bool usual = scale.range > 0.0f && scale.range < 256.0f;
  if constexpr (__is_same(F, Log8Fixed)) {
    usual = usual && scale.range < (V::kScalesAll ? 254.0f : 253.0f);
  } else {
    const float lowest = scale.lowest, highest = scale.lowest + scale.range;
    usual = usual && lowest > (V::kScalesAll ? -128.0f : -125.0f) &&
            highest < (V::kScalesAll ? 128.0f : 127.0f);
  }
  if (!usual) {
    for (int i = 0; i < n; ++i) out[i] = scale.from_z(F::dequantize(codes[i]));
    return;
  }
  int i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes)
    V::store(out + i, log_value<F>(V::load_bytes(codes + i), scale));
  if (i == n) return;
  uint8_t rest[V::kLanes] = {};
  float value[V::kLanes];
  std::memcpy(rest, codes + i, static_cast<size_t>(n - i));
  V::store(value, log_value<F>(V::load_bytes(rest), scale));
  std::memcpy(out + i, value, static_cast<size_t>(n - i) * sizeof(float));
}

}  // namespace lowbit
