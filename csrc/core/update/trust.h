// LAMB (arXiv:1904.00962) and LARS (arXiv:1708.03888), whose steps scale with the norm of the
// weights.
//
//   LAMB:  m, v as in Adam;  r = m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//                                + weight_decay * p
//          p = p - lr * |p| / |r| * r                      ratio 1 where a norm is 0
//   LARS:  q = trust_coefficient * |p| / (|g| + weight_decay * |p| + eps), 1 where a norm is 0
//          d = (g + weight_decay * p) * q
//          buf = d in the first step, then momentum * buf + (1 - dampening) * d
//          p = p - lr * buf, with nesterov lr * (d + momentum * buf)
#pragma once

#include <cstdint>

#include "core/power.h"
#include "core/update/rule.h"

namespace lowbit {

struct Lamb {
  static constexpr const char* kName = "lamb";
  static constexpr int kSlots = 2;
  static constexpr Slot kSlot[2] = {{"exp_avg", true}, {"exp_avg_sq", false}};
  static constexpr int kHypers = 5;
  static constexpr const char* kHyper[kHypers] = {"lr", "beta1", "beta2", "eps", "weight_decay"};
  static constexpr int kRounds = 1;
  LB_HD static constexpr int grid_factor(int) { return -1; }
  LB_HD static constexpr int totals(int) { return 2; }

  struct Coef {
    double lr;
    float g_scale, one_minus_beta1, beta2, one_minus_beta2, inv_bc1, inv_sqrt_bc2, eps,
        weight_decay, step;
  };
  LB_HD static Coef prepare(const double* hyper, int64_t step, double g_scale) {
    const double beta1 = hyper[1], beta2 = hyper[2];
    Coef c{};
    c.lr = hyper[0];
    c.g_scale = static_cast<float>(g_scale);
    c.one_minus_beta1 = static_cast<float>(1.0 - beta1);
    c.beta2 = static_cast<float>(beta2);
    c.one_minus_beta2 = static_cast<float>(1.0 - beta2);
    c.inv_bc1 = static_cast<float>(1.0 / (1.0 - power(beta1, step)));
    c.inv_sqrt_bc2 = static_cast<float>(1.0 / __builtin_sqrt(1.0 - power(beta2, step)));
    c.eps = static_cast<float>(hyper[3]);
    c.weight_decay = static_cast<float>(hyper[4]);
    return c;
  }
  LB_HD static float direction(float g, float p, float* s, const Coef& c) {
    const float m = moments(g, s, c);
    const float adam = m / (__builtin_sqrtf(s[1]) * c.inv_sqrt_bc2 + c.eps);
    return adam + c.weight_decay * p;
  }
  /// Moves the moments, and returns the corrected first one.
  LB_HD static float moments(float g, float* s, const Coef& c) {
    g = g * c.g_scale;
    s[0] = s[0] + (g - s[0]) * c.one_minus_beta1;
    s[1] = s[1] * c.beta2 + (g * g) * c.one_minus_beta2;
    return s[0] * c.inv_bc1;
  }
  template <int kRound>
  LB_HD static void measure(float g, float p, float* s, const float*, const Coef& c, float&,
                            float* totals) {
    const float r = direction(g, p, s, c);
    totals[0] = p * p;
    totals[1] = r * r;
  }
  LB_HD static void finalize(int, const double* totals, double, float*, Coef& c) {
    const double ratio = __builtin_sqrt(totals[0] / totals[1]);
    c.step = static_cast<float>(c.lr * (totals[0] == 0.0 || totals[1] == 0.0 ? 1.0 : ratio));
  }
  LB_HD static void update(float g, float& p, float* s, const Coef& c) {
    p = p - c.step * direction(g, p, s, c);
  }
};

struct Lars {
  static constexpr const char* kName = "lars";
  static constexpr int kSlots = 1;
  static constexpr Slot kSlot[1] = {{"momentum_buffer", true}};
  static constexpr int kHypers = 7;
  static constexpr const char* kHyper[kHypers] = {
      "lr", "momentum", "dampening", "nesterov", "weight_decay", "trust_coefficient", "eps"};
  static constexpr int kRounds = 1;
  LB_HD static constexpr int grid_factor(int) { return -1; }
  LB_HD static constexpr int totals(int) { return 2; }
  LB_HD static constexpr int reads(int) { return kReadsParam; }

  struct Coef {
    double trust_coefficient, decay, eps;
    float g_scale, momentum, fresh, nesterov, weight_decay, lr, ratio;
  };
  LB_HD static Coef prepare(const double* hyper, int64_t step, double g_scale) {
    Coef c{};
    c.trust_coefficient = hyper[5], c.decay = hyper[4], c.eps = hyper[6];
    c.g_scale = static_cast<float>(g_scale);
    c.momentum = static_cast<float>(hyper[1]);
    c.fresh = static_cast<float>(step == 1 ? 1.0 : 1.0 - hyper[2]);
    c.nesterov = hyper[3] != 0.0 ? 1.0f : 0.0f;
    c.weight_decay = static_cast<float>(hyper[4]);
    c.lr = static_cast<float>(hyper[0]);
    c.ratio = 1.0f;
    return c;
  }
  template <int kRound>
  LB_HD static void measure(float g, float p, float*, const float*, const Coef& c, float&,
                            float* totals) {
    g = g * c.g_scale;
    totals[0] = p * p;
    totals[1] = g * g;
  }
  LB_HD static void finalize(int, const double* totals, double, float*, Coef& c) {
    const double p = __builtin_sqrt(totals[0]), g = __builtin_sqrt(totals[1]);
    if (p != 0.0 && g != 0.0)
      c.ratio = static_cast<float>(c.trust_coefficient * p / (g + c.decay * p + c.eps));
  }
  LB_HD static void update(float g, float& p, float* s, const Coef& c) {
    const float d = (g * c.g_scale + c.weight_decay * p) * c.ratio;
    s[0] = c.momentum * s[0] + c.fresh * d;
    const float step = c.nesterov != 0.0f ? d + c.momentum * s[0] : s[0];
    p = p - c.lr * step;
  }
};

}  // namespace lowbit
