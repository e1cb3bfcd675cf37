// The update of 8 values by the rules that have fixed kernels, with the bits of core's update.
//
//   set      takes what it needs of the rule's coefficients
//   update   new states from gradients, old states and factors; the largest magnitude of each
//            state, as bits, of which the encoders make scales; and the new parameters
//
// Adam, AdEMAMix, Adafactor, factored AdamW, RMSprop and Adagrad divide by a root: they share
// store_adam, with another numerator, second moment and step each. CAME does so twice. LAMB adds
// the decay after it has divided. Lion, SGD, LARS and both halves of Muon need neither division nor
// root.
#pragma once

#include "cuda/step/adam.cuh"

namespace lowbit::cuda {

/// States of 8 values.
template <class U>
using Eights = float[U::kSlots > 0 ? U::kSlots : 1][kEach];
template <class U>
using Mosts = uint32_t[U::kSlots > 0 ? U::kSlots : 1];

/// The row's factor and the columns' factors of 8 values, for one factored moment.
struct Factors8 {
  float row, col[kEach];
  /// The second moment of one value.
  __device__ __forceinline__ float at(int e) const { return row * col[e]; }
};
template <class U>
using Factors = Factors8[factors_of<U>() > 0 ? factors_of<U>() : 1];

template <class U>
struct FastStep;

/// Whether a rule has fixed kernels.
template <class U>
concept HasFast = requires { sizeof(FastStep<U>); };

template <bool kDecoupled>
struct FastStep<AdamRule<kDecoupled, false>> : AdamStep<AdamRule<kDecoupled, false>> {
  using U = AdamRule<kDecoupled, false>;
  template <class P>
  __device__ __forceinline__ void update(const float (&g)[kEach], float (&p)[kEach], Eights<U>& s,
                                         const Factors<U>&, Mosts<U>& most, const Random8& random,
                                         Pack8<typename P::Storage>& param,
                                         CompensationPack<P>& compensation) const {
    for (int e = 0; e < kEach; ++e) {
      float both[2] = {s[0][e], s[1][e]};
      U::moments(g[e], p[e], both, this->coef);
      s[0][e] = both[0], s[1][e] = both[1];
    }
    const Largest largest = largest_of(s[0], s[1]);
    most[0] = float_bits(largest.m), most[1] = largest.v;
    store_adam<U, P>(*this, p, s[0], s[1], largest, random, param, compensation);
  }
};

template <>
struct FastStep<Ademamix> : AdamStep<AdamW> {
  using U = Ademamix;
  U::Coef own;

  __device__ __forceinline__ void set(const U::Coef& c) {
    own = c;
    AdamW::Coef share{};
    share.step_size = c.lr, share.inv_sqrt_bc2 = c.inv_sqrt_bc2, share.eps = c.eps;
    share.decay = c.decay;
    AdamStep<AdamW>::set(share);
  }
  template <class P>
  __device__ __forceinline__ void update(const float (&g)[kEach], float (&p)[kEach], Eights<U>& s,
                                         const Factors<U>&, Mosts<U>& most, const Random8& random,
                                         Pack8<typename P::Storage>& param,
                                         CompensationPack<P>& compensation) const {
    float numerator[kEach];
    for (int e = 0; e < kEach; ++e) {
      float all[3] = {s[0][e], s[1][e], s[2][e]};
      U::moments(g[e], p[e], all, own);
      numerator[e] = U::numerator(all, own);
      s[0][e] = all[0], s[1][e] = all[1], s[2][e] = all[2];
    }
    const Largest largest = largest_of(numerator, s[2]);
    most[0] = float_bits(largest_magnitude(s[0])), most[1] = float_bits(largest_magnitude(s[1]));
    most[2] = largest.v;
    store_adam<AdamW, P>(*this, p, numerator, s[2], largest, random, param, compensation);
  }
};

/// With the second moment factored.
template <bool kMomentum>
struct FastStep<AdafactorRule<true, kMomentum>> : AdamStep<AdamW> {
  using U = AdafactorRule<true, kMomentum>;
  typename U::Coef own;

  /// sqrt(v) 1 + 0 is sqrt(v), and v is at least the smallest normal number.
  __device__ __forceinline__ void set(const typename U::Coef& c) {
    own = c;
    AdamW::Coef share{};
    share.step_size = c.step, share.inv_sqrt_bc2 = 1.0f, share.eps = 0.0f, share.decay = c.decay;
    AdamStep<AdamW>::set(share, true);
  }
  template <class P>
  __device__ __forceinline__ void update(const float (&g)[kEach], float (&p)[kEach], Eights<U>& s,
                                         const Factors<U>& factors, Mosts<U>& most,
                                         const Random8& random, Pack8<typename P::Storage>& param,
                                         CompensationPack<P>& compensation) const {
    float numerator[kEach], v[kEach];
    for (int e = 0; e < kEach; ++e) {
      const float f[2] = {factors[0].row, factors[0].col[e]};
      float m = kMomentum ? s[0][e] : 0.0f;
      numerator[e] = U::moments(g[e] * own.g_scale, &m, f, own, v[e]);
      if constexpr (kMomentum) s[0][e] = m;
      p[e] = p[e] * own.decay;
    }
    if constexpr (kMomentum) most[0] = float_bits(largest_magnitude(s[0]));
    store_adam<AdamW, P>(*this, p, numerator, v, largest_of(numerator, v), random, param,
                         compensation);
  }
};

template <>
struct FastStep<AdamWFactored> : AdamStep<AdamW> {
  using U = AdamWFactored;
  template <class P>
  __device__ __forceinline__ void update(const float (&g)[kEach], float (&p)[kEach], Eights<U>& s,
                                         const Factors<U>& factors, Mosts<U>& most,
                                         const Random8& random, Pack8<typename P::Storage>& param,
                                         CompensationPack<P>& compensation) const {
    float v[kEach];
    for (int e = 0; e < kEach; ++e) {
      const float f[2] = {factors[0].row, factors[0].col[e]};
      v[e] = U::moments(g[e], p[e], s[0][e], f, this->coef);
    }
    const Largest largest = largest_of(s[0], v);
    most[0] = float_bits(largest.m);
    store_adam<AdamW, P>(*this, p, s[0], v, largest, random, param, compensation);
  }
};

/// The gradient over the root of the only state.
template <class Rule>
  requires(__is_same(Rule, Rmsprop) || __is_same(Rule, Adagrad))
struct FastStep<Rule> : AdamStep<AdamW> {
  using U = Rule;
  typename U::Coef own;

  /// sqrt(v) 1 is sqrt(v), and the decay is part of the gradient.
  __device__ __forceinline__ void set(const typename U::Coef& c) {
    own = c;
    AdamW::Coef share{};
    share.step_size = c.lr, share.inv_sqrt_bc2 = 1.0f, share.eps = c.eps, share.decay = 1.0f;
    AdamStep<AdamW>::set(share);
  }
  template <class P>
  __device__ __forceinline__ void update(const float (&g)[kEach], float (&p)[kEach], Eights<U>& s,
                                         const Factors<U>&, Mosts<U>& most, const Random8& random,
                                         Pack8<typename P::Storage>& param,
                                         CompensationPack<P>& compensation) const {
    float numerator[kEach];
    for (int e = 0; e < kEach; ++e) {
      float one[1] = {s[0][e]};
      numerator[e] = U::moments(g[e], p[e], one, own);
      s[0][e] = one[0];
    }
    const Largest largest = largest_of(numerator, s[0]);
    most[0] = largest.v;
    store_adam<AdamW, P>(*this, p, numerator, s[0], largest, random, param, compensation);
  }
};

/// The quotients of 8 numbers and roots of second moments, u = n / sqrt(v), rounded as core's.
__device__ __forceinline__ void over_roots(const float (&n)[kEach], const float (&v)[kEach],
                                           float (&u)[kEach]) {
  float least = v[0], most = v[0];
  for (int e = 1; e < kEach; ++e) least = fminf(least, v[e]), most = fmaxf(most, v[e]);
  uint32_t smallest = ~0u;  // a zero less 1 is the largest number
  for (int e = 0; e < kEach; ++e) {
    const uint32_t b = magnitude_bits(n[e]) - 1;
    smallest = b < smallest ? b : smallest;
  }
  // Roots lie in [2^-50, 2^20]. A zero may lose its sign, which the moments do not see.
  if (least >= 0x1p-100f && most < 0x1p40f && smallest >= float_bits(0x1p-50f) - 1 &&
      float_bits(largest_magnitude(n)) < float_bits(0x1p40f)) {
    for (int e = 0; e < kEach; ++e) {
      const float root = sqrt_in_range(v[e]);
      u[e] = divide_in_range(n[e], root, reciprocal_in_range(root));
    }
  } else {
    for (int e = 0; e < kEach; ++e) u[e] = n[e] / __builtin_sqrtf(v[e]);
  }
}

/// With two factored moments: that of the gradient, and that of what the first moment misses.
template <>
struct FastStep<Came> : AdamStep<AdamW> {
  using U = Came;
  U::Coef own;

  __device__ __forceinline__ void set(const U::Coef& c) {
    own = c;
    AdamW::Coef share{};
    share.step_size = c.lr, share.inv_sqrt_bc2 = 1.0f, share.eps = 0.0f, share.decay = c.decay;
    AdamStep<AdamW>::set(share, true);
  }
  template <class P>
  __device__ __forceinline__ void update(const float (&g)[kEach], float (&p)[kEach], Eights<U>& s,
                                         const Factors<U>& factors, Mosts<U>& most,
                                         const Random8& random, Pack8<typename P::Storage>& param,
                                         CompensationPack<P>& compensation) const {
    float scaled[kEach], v[kEach], u[kEach];
    const auto second_moment = [&](int k, int e) {
      return U::product(factors[k].row, factors[k].col[e]);
    };
    for (int e = 0; e < kEach; ++e) scaled[e] = g[e] * own.g_scale, v[e] = second_moment(0, e);
    over_roots(scaled, v, u);
    for (int e = 0; e < kEach; ++e) {
      U::move(u[e] * own.clip, s[0][e], own);
      v[e] = second_moment(1, e);  // at least 2^-126, in the bracket's range
      p[e] *= own.decay;
    }
    const Largest largest = largest_of(s[0], v);
    most[0] = float_bits(largest.m);
    store_adam<AdamW, P>(*this, p, s[0], v, largest, random, param, compensation);
  }
};

template <>
struct FastStep<Lamb> {
  using U = Lamb;
  U::Coef coef;
  bool ordinary;  // whether the coefficients are in range

  __device__ __forceinline__ void set(const U::Coef& c) {
    coef = c;
    ordinary = c.eps >= 0x1p-40f && c.eps <= 0x1p20f && c.inv_sqrt_bc2 >= 0x1p-10f &&
               c.inv_sqrt_bc2 <= 0x1p10f && c.inv_bc1 <= 0x1p20f;
  }
  template <class P>
  __device__ __forceinline__ void update(const float (&g)[kEach], float (&p)[kEach], Eights<U>& s,
                                         const Factors<U>&, Mosts<U>& most, const Random8& random,
                                         Pack8<typename P::Storage>& param,
                                         CompensationPack<P>& compensation) const {
    float m[kEach], next[kEach];
    for (int e = 0; e < kEach; ++e) {
      float both[2] = {s[0][e], s[1][e]};
      m[e] = U::moments(g[e], both, coef);
      s[0][e] = both[0], s[1][e] = both[1];
    }
    const Largest largest = largest_of(s[0], s[1]);
    most[0] = float_bits(largest.m), most[1] = largest.v;
    float smallest_m = fabsf(m[0]), smallest_v = s[1][0];
    for (int e = 1; e < kEach; ++e) {
      smallest_m = smaller_magnitude(smallest_m, m[e]);
      smallest_v = fminf(smallest_v, s[1][e]);
    }
    const bool usual = ordinary && float_bits(largest.m) < kModerate && largest.v < kModerate &&
                       smallest_m >= 0x1p-55f && smallest_v >= 0x1p-100f;
    for (int e = 0; e < kEach; ++e) {
      float adam;
      if (usual) {
        const float below = sqrt_in_range(s[1][e]) * coef.inv_sqrt_bc2 + coef.eps;
        adam = divide_in_range(m[e], below, reciprocal_in_range(below));
      } else {
        adam = m[e] / (__builtin_sqrtf(s[1][e]) * coef.inv_sqrt_bc2 + coef.eps);
      }
      next[e] = p[e] - coef.step * (adam + coef.weight_decay * p[e]);
    }
    store_next<P>(next, random, param, compensation);
  }
};

/// At most one state, and neither division nor root.
template <class Rule>
  requires(__is_same(Rule, Lion) || __is_same(Rule, Sgd) || __is_same(Rule, SgdMomentum) ||
           __is_same(Rule, Lars) || __is_same(Rule, MuonMomentum) || __is_same(Rule, Muon))
struct FastStep<Rule> {
  using U = Rule;
  typename U::Coef coef;
  __device__ __forceinline__ void set(const typename U::Coef& c) { coef = c; }
  template <class P>
  __device__ __forceinline__ void update(const float (&g)[kEach], float (&p)[kEach], Eights<U>& s,
                                         const Factors<U>&, Mosts<U>& most, const Random8& random,
                                         Pack8<typename P::Storage>& param,
                                         CompensationPack<P>& compensation) const {
    for (int e = 0; e < kEach; ++e) {
      Values<U> one{};
      if constexpr (U::kSlots > 0) one[0] = s[0][e];
      U::update(g[e], p[e], one, coef);
      if constexpr (U::kSlots > 0) s[0][e] = one[0];
    }
    if constexpr (U::kSlots > 0) most[0] = float_bits(largest_magnitude(s[0]));
    store_next<P>(p, random, param, compensation);
  }
};

// ---- a mean over thousands of steps ----

/// Whether a fixed kernel rounds a slot at random: such a mean in bfloat16, as presets keep it.
template <class U, class F>
LB_HD constexpr bool is_drawn(int slot) {
  return U::kSlot[slot].is_slow && __is_same(F, BFloat16State);
}

/// Stores 8 values, rounded by the slot's own random bits; `most` is their largest magnitude.
template <class F>
__device__ __forceinline__ void store_slow(const float (&x)[kEach], uint32_t most,
                                           const Random8& random, char* at) {
  static_assert(__is_same(F, BFloat16State));
  Pack8<uint16_t> pack;
  pack.clear();
  if (most < float_bits(0x1p100f)) {
    for (int i = 0; i < kEach / 2; ++i)
      pack.word[i] = round_two<BFloat16Stochastic>(x[2 * i], x[2 * i + 1], random.word[i]);
  } else {
    for (int e = 0; e < kEach; ++e) pack.set(e, F::quantize(x[e], random.bits16(e)));
  }
  pack.store(at);
}

}  // namespace lowbit::cuda
