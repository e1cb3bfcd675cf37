// Stochastic codes of float8.h, in vectors, with the codes of stochastic.h.
//
// In a binade codes are evenly spaced, and the last bits of a float are its share of the way to the
// next code, exactly. a + max(a, the smallest normal) has the bits of the code and the share also
// for subnormal values. r says how the share decides in steps of 2^-16; shares have kShift bits, so
// the middle of a step is added:
//
//   the lower code is nearer   up where share > r + 1/2        sum = share + ~(r + 1/2)
//   the upper code is nearer   up where share >= 1 - r - 1/2   sum = share + r + 1/2
//
// The code is what is above the share's bits. Shares of subnormal values are rounded, so the
// definition is asked where the last bit decides: once in 2^19 values.
//
// Included by float8.h, at its end, and by nothing else.
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

template <class F>
struct Float8ByChance {
  using V = Vector;
  using Int = V::Int;
  static constexpr int kTurn = 4 * V::kLanes, kShift = F::kShift, kFree = 32 - kShift;
  static constexpr uint32_t kMinNormal = static_cast<uint32_t>(128 - F::kBias) << 23,
                            kMin = kMinNormal - (static_cast<uint32_t>(23 - kShift) << 23);

  LB_HD static Int words(uint32_t x) { return V::all_words(static_cast<int>(x)); }

  /// Codes in the top bytes of words. A value is unsure where `least` is below 2^(kFree + 1).
  LB_HD static Int codes_of(const float* x, V::Float scale, const uint16_t* random16, Int& least) {
    const V::Float z = V::over(V::load(x), scale);
    V::Float a = V::magnitude(z);
    if constexpr (!F::kSigned) a = V::where_positive(z, V::larger(z, V::all(bits_float(kMin))));
    a = V::smaller(a, V::all(static_cast<float>(F::kMaximum)));
    const Int k = V::bits(V::plus(a, V::larger(a, V::all(bits_float(kMinNormal)))));
    const Int share = V::template up<kFree>(k);
    const Int even = V::without(V::template down<kShift>(k), words(1));
    const Int r = V::either(V::template up<kShift - 16>(V::load_chance(random16)),
                            words(1u << (kShift - 17)));
    // The sign of share - even tells the nearer code: a tie goes to the even one.
    const Int sum =
        V::plus(k, V::template flip_below<31>(V::minus(share, even), r, words((1u << kShift) - 1)));
    least = V::smaller_words(V::template up<kFree>(V::plus(sum, words(1))),
                             V::either(share, words(0x80000000u)));
    const Int code = V::template up<24 - kShift>(V::minus(sum, words(kMinNormal)));
    return F::kSigned ? V::bits(V::signed_as(V::floats(code), z)) : code;
  }

  LB_HD static void turn(const float* x, const TopScale<F::kMaximum>& scale,
                         const uint16_t* random16, uint8_t* codes) {
    const V::Float all = V::all(scale.scale);
    Int code[4], least[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v)
      code[v] = codes_of(x + v * V::kLanes, all, random16 + v * V::kLanes, least[v]);
    V::store_signed(code, codes);
    define_where<V>(
        least, [](Int a, Int b) LB_LAMBDA { return V::smaller_words(a, b); },
        [](Int a) LB_LAMBDA { return V::template below<kFree + 1>(a); },
        [&](int i) LB_LAMBDA {
          codes[i] = static_cast<uint8_t>(quantize_stochastic<F>(scale, x[i], random16[i]));
        });
  }
};

template <int kMantissa, int kTopCode, int kTopValue, bool kWithSign>
LB_HD void quantize_block_by_chance(Float8Code<kMantissa, kTopCode, kTopValue, kWithSign>,
                                    const float* x, const TopScale<kTopValue>& given,
                                    const uint16_t* random16, uint8_t* codes, int n) {
  using Chance = Float8ByChance<Float8Code<kMantissa, kTopCode, kTopValue, kWithSign>>;
  const TopScale<kTopValue> scale = given;
  in_turns<Chance::kTurn>(x, random16, codes, n,
                          [&](const float* some, const uint16_t* chance, uint8_t* out)
                              LB_LAMBDA { Chance::turn(some, scale, chance, out); });
}

}  // namespace lowbit
