// AdEMAMix (arXiv:2409.03137): Adam with a second, slow mean of the gradient.
//
//   m1 = m1 + (g - m1) * (1 - beta1)
//   m2 = m2 + (g - m2) * (1 - beta3)       exact where g = m2; beta3 = 0.9999 in float32 is not
//   v  = beta2 * v + (1 - beta2) * g^2
//   p  = p * (1 - lr * weight_decay)
//   p  = p - lr * (m1 / (1 - beta1^t) + alpha * m2) / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// Schedules, if t_alpha or t_beta3 > 0:
//   s = t / t_beta3
//   alpha_t = min(t * alpha / t_alpha, alpha)
//   beta3_t = min(exp(ln beta1 * ln beta3 / ((1 - s) ln beta3 + s ln beta1)), beta3)
#pragma once

#include <cstdint>

#include "core/explog.h"
#include "core/power.h"
#include "core/update/rule.h"

namespace lowbit {

struct Ademamix {
  static constexpr const char* kName = "ademamix";
  static constexpr int kSlots = 3;
  static constexpr Slot kSlot[3] = {
      {"exp_avg", true}, {"exp_avg_slow", true, false, true}, {"exp_avg_sq", false}};
  static constexpr int kHypers = 9;
  static constexpr const char* kHyper[kHypers] = {
      "lr", "beta1", "beta2", "beta3", "alpha", "t_alpha", "t_beta3", "eps", "weight_decay"};

  struct Coef {
    float g_scale, decay, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta3, inv_bc1,
        inv_sqrt_bc2, alpha, eps, lr;
  };
  LB_HD static Coef prepare(const double* hyper, int64_t step, double g_scale) {
    const double beta1 = hyper[1], beta2 = hyper[2], t = static_cast<double>(step);
    double beta3 = hyper[3], alpha = hyper[4];
    if (hyper[5] > 0.0 && t < hyper[5]) alpha = t * alpha / hyper[5];
    if (hyper[6] > 0.0 && t < hyper[6] && beta3 > 0.0) {
      const double s = t / hyper[6], log3 = log_of(beta3);
      double exponent = log3 / s;  // the limit for beta1 -> 0
      if (beta1 > 0.0) {
        const double log1 = log_of(beta1);
        exponent = log1 * log3 / ((1.0 - s) * log3 + s * log1);
      }
      const double scheduled = exp_of(exponent);
      if (scheduled < beta3) beta3 = scheduled;
    }
    Coef c;
    c.g_scale = static_cast<float>(g_scale);
    c.decay = static_cast<float>(1.0 - hyper[0] * hyper[8]);
    c.one_minus_beta1 = static_cast<float>(1.0 - beta1);
    c.beta2 = static_cast<float>(beta2);
    c.one_minus_beta2 = static_cast<float>(1.0 - beta2);
    c.one_minus_beta3 = static_cast<float>(1.0 - beta3);
    c.inv_bc1 = static_cast<float>(1.0 / (1.0 - power(beta1, step)));
    c.inv_sqrt_bc2 = static_cast<float>(1.0 / __builtin_sqrt(1.0 - power(beta2, step)));
    c.alpha = static_cast<float>(alpha);
    c.eps = static_cast<float>(hyper[7]);
    c.lr = static_cast<float>(hyper[0]);
    return c;
  }
  LB_HD static void update(float g, float& p, float (&s)[3], const Coef& c) {
    moments(g, p, s, c);
    p = p - c.lr * (numerator(s, c) / (__builtin_sqrtf(s[2]) * c.inv_sqrt_bc2 + c.eps));
  }

  // The parts of `update`, for processors that divide 8 values at once.

  /// Moves the moments and decays p.
  LB_HD static void moments(float g, float& p, float (&s)[3], const Coef& c) {
    g = g * c.g_scale;
    s[0] = s[0] + (g - s[0]) * c.one_minus_beta1;
    s[1] = s[1] + (g - s[1]) * c.one_minus_beta3;
    s[2] = c.beta2 * s[2] + c.one_minus_beta2 * (g * g);
    p = p * c.decay;
  }
  LB_HD static float numerator(const float (&s)[3], const Coef& c) {
    return s[0] * c.inv_bc1 + c.alpha * s[1];
  }
};

}  // namespace lowbit
