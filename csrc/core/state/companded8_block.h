// companded8.h in vectors, with the same codes. Positions are in steps of 2^-16, and products
// replace divisions by the scale; the definition is asked where the error of a position could
// decide.
//
//   signed     position 254 a / (1 + a) of a = |z|. Entry n is n / (254 - n), so the share of the
//              way from n to n + 1 is (a (254 - n) - n) (253 - n) / 254: no division by a
//              difference
//   unsigned   position 255 sqrt(x) / a. The chance is linear in x, and values have the scale that
//              is stored, s: the share is (x (255 / s)^2 - n^2) / (2 n + 1)
//
// Included by companded8.h, at its end, and by nothing else.
#pragma once

#include "core/state/chance/chance_vector.h"
#include "core/state/chance/stochastic.h"
#include "core/state/turns.h"

namespace lowbit {

constexpr float kStep16 = 65536.0f;
constexpr int kTurnOfCompanded = 32;  // a block

struct CompandedVector {
  using V = Vector;
  using Float = V::Float;
  using Int = V::Int;
  static constexpr int kUnsure = 16, kCount = kTurnOfCompanded / V::kLanes;
  static constexpr int kNearest = 0x8000 + kUnsure / 2;  // to the nearest code, within the error
  LB_HD static Int whole(Int position) {
    return V::both(position, V::all_words(static_cast<int>(0xffff0000u)));
  }
};

struct SoftsignVector : CompandedVector {
  Float inverse;
  LB_HD explicit SoftsignVector(const HalfScale<false>& s) : inverse(V::all(1.0f / s.divisor)) {}

  LB_HD static Float magnitude(Float z) { return V::smaller(V::magnitude(z), V::all(1.0f)); }
  LB_HD static Float position(Float a) {
    return V::over(V::times(a, V::all(254.0f * kStep16)), V::plus(a, V::all(1.0f)));
  }
  LB_HD Int nearest(const float* x) const {
    const Float z = V::times(V::load(x), inverse);
    return V::plus(V::rounded(V::signed_as(position(magnitude(z)), z)),
                   V::all_words((127 << 16) + kNearest));
  }
  LB_HD Int by_chance(const float* x, const uint16_t* random16, Int& least) const {
    const Float z = V::times(V::load(x), inverse), a = magnitude(z);
    const Int near = V::rounded(position(a)), below = whole(near);
    const Float n = V::to_float(below);  // in steps
    const Float left = V::minus(V::all(254.0f * kStep16), n);
    const Float past = V::product_minus(a, left, n);
    const Float rate =
        V::product_minus(left, V::all(1.0f / (254.0f * kStep16)), V::all(1.0f / 254.0f));
    const Int share = V::rounded(V::times(past, rate));
    const Int sum = add_chance<kUnsure, V>(V::plus(below, share), near, random16, least);
    return V::plus(V::with_sign(whole(sum), z), V::all_words(127 << 16));
  }
};

struct RootVector : CompandedVector {
  static constexpr int kUnsure = 32;  // of shares
  Float divisor, steps, square;
  LB_HD explicit RootVector(const HalfScale<true>& s) : divisor(V::all(s.divisor)) {
    const float per_unit = 255.0f * kStep16 / s.divisor, of_value = 255.0f * kStep16 / s.scale;
    steps = V::all(per_unit), square = V::all(of_value * of_value);
  }

  LB_HD Int nearest(const float* x) const {
    const Float u = V::larger(V::load(x), V::all(0.0f));
    const Float t = V::smaller(V::times(V::root(u), steps), V::all(255.0f * kStep16));
    // A positive value never becomes zero.
    return V::plus(V::rounded(V::larger(t, V::where_positive(u, V::all(kStep16)))),
                   V::all_words(kNearest));
  }
  LB_HD Int by_chance(const float* x, const uint16_t* random16, Int& least) const {
    const Float u = V::larger(V::load(x), V::all(0.0f)), root = V::root(u);
    // A quarter of a step from a code, positions are certain: zero, those below the first code,
    // which become the first, and the block's largest value.
    const Float first = V::plus(V::where_positive(u, V::all(kStep16)), V::all(0.25f * kStep16));
    Float t = V::times(root, steps);
    const typename V::Mask above = V::at_least(t, V::all(kStep16 - kUnsure / 4));
    const Float limit = V::choose(above, V::all(0.0f), V::all(kStep16));
    t = V::choose(above, first, t);
    t = V::choose(V::at_least(root, divisor), t, V::all(255.25f * kStep16));
    const Int near = V::rounded(t), below = whole(near);
    const Float n = V::to_float(below);
    Float share = V::over(V::minus_product(n, n, V::times(u, square)),
                          V::plus_product(n, V::all(2.0f), V::all(kStep16)));
    share = V::smaller(V::larger(share, V::all(0.0f)), limit);
    const Int sum =
        add_chance<kUnsure, V>(V::plus(below, V::rounded(share)), near, random16, least);
    // The stored scale is a rounded one: the shares on both sides of a code do not meet there.
    const Int twice = V::template up<1>(V::plus(near, V::all_words(kUnsure / 4)));
    least = V::smaller_halves(twice, sum);
    return sum;
  }
};

template <class F>
concept IsCompanded = __is_same(F, Companded8) || __is_same(F, Companded8Unsigned);
template <class F>
struct CompandedVectors {
  using Of = SoftsignVector;
};
template <>
struct CompandedVectors<Companded8Unsigned> {
  using Of = RootVector;
};

template <class F>
  requires IsCompanded<F>
LB_HD void quantize_block(F, const float* x, const typename F::Scale& given, uint8_t* codes,
                          int n) {
  using Of = typename CompandedVectors<F>::Of;
  using V = typename Of::V;
  const typename F::Scale scale = given;
  const Of of(scale);
  in_turns<kTurnOfCompanded>(x, codes, n, [&](const float* some, uint8_t* out) LB_LAMBDA {
    typename V::Int k[Of::kCount];
    for (int v = 0; v < Of::kCount; ++v) k[v] = of.nearest(some + v * V::kLanes);
    V::store_upper(k, out);
    define_unsure<V, CompandedVector::kUnsure>(k, [&](int i) LB_LAMBDA {
      out[i] = static_cast<uint8_t>(F::quantize(scale.to_z(some[i])));
    });
  });
}

template <class F>
  requires IsCompanded<F>
LB_HD void quantize_block_by_chance(F, const float* x, const typename F::Scale& given,
                                    const uint16_t* random16, uint8_t* codes, int n) {
  using Of = typename CompandedVectors<F>::Of;
  using V = typename Of::V;
  const typename F::Scale scale = given;
  const Of of(scale);
  in_turns<kTurnOfCompanded>(
      x, random16, codes, n,
      [&](const float* some, const uint16_t* chance, uint8_t* out) LB_LAMBDA {
        typename V::Int sum[Of::kCount], least[Of::kCount];
        for (int v = 0; v < Of::kCount; ++v)
          sum[v] = of.by_chance(some + v * V::kLanes, chance + v * V::kLanes, least[v]);
        V::store_upper(sum, out);
        define_unsure<V, Of::kUnsure>(least, [&](int i) LB_LAMBDA {
          out[i] = static_cast<uint8_t>(quantize_stochastic<F>(scale, some[i], chance[i]));
        });
      });
}

}  // namespace lowbit
