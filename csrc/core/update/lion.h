// Lion (arXiv:2302.06675).
//
//   p = p * (1 - lr * weight_decay)
//   p = p - lr * sign(beta1 * m + (1 - beta1) * g)        sign(0) = 0
//   m = beta2 * m + (1 - beta2) * g
//
// The sign of a value that is not finite is NaN. Otherwise a gradient that overflowed would step
// like any other and stay in m forever.
#pragma once

#include <cstdint>

#include "core/update/rule.h"

namespace lowbit {

struct Lion {
  static constexpr const char* kName = "lion";
  static constexpr const char* kCautiousName = "cautious_lion";
  static constexpr int kSlots = 1;
  static constexpr Slot kSlot[1] = {{"exp_avg", true}};
  static constexpr int kHypers = 4;
  static constexpr const char* kHyper[kHypers] = {"lr", "beta1", "beta2", "weight_decay"};

  struct Coef {
    float g_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
  };
  LB_HD static Coef prepare(const double* hyper, int64_t, double g_scale) {
    Coef c;
    c.g_scale = static_cast<float>(g_scale);
    c.decay = static_cast<float>(1.0 - hyper[0] * hyper[3]);
    c.beta1 = static_cast<float>(hyper[1]);
    c.one_minus_beta1 = static_cast<float>(1.0 - hyper[1]);
    c.beta2 = static_cast<float>(hyper[2]);
    c.one_minus_beta2 = static_cast<float>(1.0 - hyper[2]);
    c.lr = static_cast<float>(hyper[0]);
    return c;
  }
  LB_HD static void update(float g, float& p, float (&s)[1], const Coef& c) {
    const float u = direction(g, p, s, c, g);
    p = p - c.lr * u;
  }

  // The step before the learning rate; also for core/update/cautious.h.
  LB_HD static float direction(float g, float& p, float (&s)[1], const Coef& c, float& along) {
    g = g * c.g_scale;
    along = g;
    const float u = c.beta1 * s[0] + c.one_minus_beta1 * g;
    const float sign = u > 0.0f ? 1.0f : u < 0.0f ? -1.0f : 0.0f;
    p = p * c.decay;
    s[0] = c.beta2 * s[0] + c.one_minus_beta2 * g;
    return sign + u * 0.0f;  // u * 0: zero, or NaN if u is not finite
  }
  LB_HD static float rate(const Coef& c) { return c.lr; }
};

}  // namespace lowbit
