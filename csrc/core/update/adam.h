// Adam (arXiv:1412.6980) with L2 decay, AdamW (arXiv:1711.05101) with decoupled decay, each also as
// AMSGrad; torch's definitions.
//
//   g  = g * g_scale                                  g_scale = (maximize ? -1 : 1) / grad_scale
//   Adam:   g = g + weight_decay * p
//   AdamW:  p = p * (1 - lr * weight_decay)
//   m  = m + (g - m) * (1 - beta1)
//   v  = v * beta2 + g^2 * (1 - beta2)
//   AMSGrad:  u = u max v,  and u instead of v below
//   p  = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// in float32, each operation rounded once and never fused, with factors that are constant over the
// tensor taken in double.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/power.h"
#include "core/update/rule.h"

namespace lowbit {

template <bool kDecoupled, bool kAmsgrad>
struct AdamRule {
  static constexpr const char* kName =
      kDecoupled ? (kAmsgrad ? "adamw_amsgrad" : "adamw") : (kAmsgrad ? "adam_amsgrad" : "adam");
  static constexpr const char* kCautiousName =
      kDecoupled ? (kAmsgrad ? "cautious_adamw_amsgrad" : "cautious_adamw")
                 : (kAmsgrad ? "cautious_adam_amsgrad" : "cautious_adam");
  static constexpr int kSlots = kAmsgrad ? 3 : 2;
  static constexpr Slot kSlot[3] = {
      {"exp_avg", true}, {"exp_avg_sq", false}, {"max_exp_avg_sq", false}};
  static constexpr int kHypers = 5;
  static constexpr const char* kHyper[kHypers] = {"lr", "beta1", "beta2", "eps", "weight_decay"};

  struct Coef {
    float g_scale, decay, weight_decay, one_minus_beta1, beta2, one_minus_beta2, step_size,
        inv_sqrt_bc2, eps;
  };

  /// `hyper` as kHyper lists it, `step` counted from 1. Once per tensor.
  LB_HD static Coef prepare(const double* hyper, int64_t step, double g_scale) {
    const double lr = hyper[0], beta1 = hyper[1], beta2 = hyper[2], eps = hyper[3],
                 weight_decay = hyper[4];
    const double bc1 = 1.0 - power(beta1, step), bc2 = 1.0 - power(beta2, step);
    Coef c;
    c.g_scale = static_cast<float>(g_scale);
    c.decay = static_cast<float>(1.0 - lr * weight_decay);
    c.weight_decay = static_cast<float>(weight_decay);
    c.one_minus_beta1 = static_cast<float>(1.0 - beta1);
    c.beta2 = static_cast<float>(beta2);
    c.one_minus_beta2 = static_cast<float>(1.0 - beta2);
    c.step_size = static_cast<float>(lr / bc1);
    c.inv_sqrt_bc2 = static_cast<float>(1.0 / __builtin_sqrt(bc2));
    c.eps = static_cast<float>(eps);
    return c;
  }

  LB_HD static void update(float g, float& p, float (&s)[kSlots], const Coef& c) {
    moments(g, p, s, c);
    p = next(p, s[0], s[kAmsgrad ? 2 : 1], c);
  }

  // The halves of `update`, for processors that check the second one for 8 values at once.

  /// Moves the moments, and decays p or adds the decay to g, which is returned.
  LB_HD static float moments(float g, float& p, float (&s)[kSlots], const Coef& c) {
    g = g * c.g_scale;
    if constexpr (kDecoupled) {
      p = p * c.decay;
    } else {
      g = g + c.weight_decay * p;
    }
    s[0] = s[0] + (g - s[0]) * c.one_minus_beta1;
    s[1] = s[1] * c.beta2 + (g * g) * c.one_minus_beta2;
    if constexpr (kAmsgrad) {
      const float v = s[1];
      s[2] = (v > s[2] || v != v) ? v : s[2];  // a NaN on either side stays
    }
    return g;
  }
  LB_HD static float next(float p, float m, float v, const Coef& c) {
    return p - c.step_size * (m / (__builtin_sqrtf(v) * c.inv_sqrt_bc2 + c.eps));
  }

  // For core/update/cautious.h.
  LB_HD static float direction(float g, float& p, float (&s)[kSlots], const Coef& c, float& along) {
    along = moments(g, p, s, c);
    return s[0] / (__builtin_sqrtf(s[kAmsgrad ? 2 : 1]) * c.inv_sqrt_bc2 + c.eps);
  }
  LB_HD static float rate(const Coef& c) { return c.step_size; }
};

using AdamW = AdamRule<true, false>;
using Adam = AdamRule<false, false>;
using AdamWAmsgrad = AdamRule<true, true>;
using AdamAmsgrad = AdamRule<false, true>;

}  // namespace lowbit
