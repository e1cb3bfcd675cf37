// Adam and AdamW with a factored second moment ("4-bit Factor", arXiv:2309.01507): row and column
// means of g^2 replace v.
//
//   Adam:  g = g + weight_decay * p        AdamW:  p = p * (1 - lr * weight_decay)
//   R  = R + (mean over columns of g^2 - R) * (1 - beta2)       of each row
//   C  = C + (mean over rows of g^2 - C) * (1 - beta2)          of each column
//   v  = R * C / mean(R)                                        never stored
//   m  = m + (g - m) * (1 - beta1)
//   p  = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
#pragma once

#include <cstdint>

#include "core/update/adam.h"

namespace lowbit {

template <bool kDecoupled>
struct FactoredAdam {
  static constexpr const char* kName = kDecoupled ? "adamw_factored" : "adam_factored";
  static constexpr int kSlots = 1;
  static constexpr Slot kSlot[1] = {{"exp_avg", true}};
  static constexpr int kFactors = 1;
  static constexpr const char* kFactor[1] = {"exp_avg_sq"};
  static constexpr int kHypers = 5;
  static constexpr const char* kHyper[kHypers] = {"lr", "beta1", "beta2", "eps", "weight_decay"};
  static constexpr int kRounds = 1;
  LB_HD static constexpr int grid_factor(int) { return 0; }
  LB_HD static constexpr int totals(int) { return 0; }
  LB_HD static constexpr int reads(int) { return kDecoupled ? 0 : kReadsParam; }

  using Coef = AdamW::Coef;
  LB_HD static Coef prepare(const double* hyper, int64_t step, double g_scale) {
    return AdamW::prepare(hyper, step, g_scale);
  }
  LB_HD static float factor_weight(int, const Coef& c) { return c.one_minus_beta2; }
  LB_HD static float min_mean(int, const Coef&) { return 0.0f; }
  LB_HD static void finalize(int, const double*, double, float*, Coef&) {}

  template <int kRound>
  LB_HD static void measure(float g, float p, float*, const float*, const Coef& c, float& grid,
                            float*) {
    g = g * c.g_scale;
    if constexpr (!kDecoupled) g = g + c.weight_decay * p;
    grid = g * g;
  }

  LB_HD static void update(float g, float& p, float* s, const float* f, const Coef& c) {
    const float v = moments(g, p, s[0], f, c);
    p = p - c.step_size * (s[0] / (__builtin_sqrtf(v) * c.inv_sqrt_bc2 + c.eps));
  }
  /// The first half of `update`: moves m, and decays p or adds the decay to g. Returns v.
  LB_HD static float moments(float g, float& p, float& m, const float* f, const Coef& c) {
    g = g * c.g_scale;
    if constexpr (kDecoupled) {
      p = p * c.decay;
    } else {
      g = g + c.weight_decay * p;
    }
    m = m + (g - m) * c.one_minus_beta1;
    return f[0] * f[1];
  }
};

using AdamWFactored = FactoredAdam<true>;
using AdamFactored = FactoredAdam<false>;

}  // namespace lowbit
