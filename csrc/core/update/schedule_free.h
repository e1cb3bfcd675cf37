// Schedule-Free AdamW (arXiv:2405.15682), in the form of the authors' package schedulefree 1.4.1:
// the parameter holds y, where gradients are taken, and the state holds z. The average x = (y - (1
// - beta1) z) / beta1 is stored nowhere.
//
//   v = v * beta2 + g^2 * (1 - beta2)
//   d = g / (sqrt(v) / sqrt(1 - beta2^t) + eps) + weight_decay * y
//   y = lerp(y, z, average)                          average: the share of this step in x
//   y = y - lr * (1 - beta1 * (1 - average)) * d
//   z = z - lr * d
//
// in float32, each operation rounded once and never fused, with factors that are constant over the
// tensor taken in double. In the first step z is y, whatever the state holds: weights may be loaded
// after the optimizer was built.
//
// lr includes the warm-up. average is lr_max^p * t^r over the sum of these weights so far: the host
// computes both, because they depend on all learning rates before.
#pragma once

#include <cstdint>

#include "core/power.h"
#include "core/update/muon.h"
#include "core/update/rule.h"

namespace lowbit {

struct ScheduleFreeAdamW {
  static constexpr const char* kName = "schedule_free_adamw";
  static constexpr int kSlots = 2;
  static constexpr Slot kSlot[2] = {{"z", true, true}, {"exp_avg_sq", false}};
  static constexpr int kHypers = 6;
  static constexpr const char* kHyper[kHypers] = {"lr",  "beta1",        "beta2",
                                                  "eps", "weight_decay", "average"};

  struct Coef {
    float g_scale, beta2, one_minus_beta2, inv_sqrt_bc2, eps, weight_decay, y_step, z_step;
    Lerp average;
    bool first;
  };
  LB_HD static Coef prepare(const double* hyper, int64_t step, double g_scale) {
    const double lr = hyper[0], beta1 = hyper[1], beta2 = hyper[2], average = hyper[5];
    Coef c;
    c.g_scale = static_cast<float>(g_scale);
    c.beta2 = static_cast<float>(beta2);
    c.one_minus_beta2 = static_cast<float>(1.0 - beta2);
    c.inv_sqrt_bc2 = static_cast<float>(1.0 / __builtin_sqrt(1.0 - power(beta2, step)));
    c.eps = static_cast<float>(hyper[3]);
    c.weight_decay = static_cast<float>(hyper[4]);
    c.y_step = static_cast<float>(lr * (1.0 - beta1 * (1.0 - average)));
    c.z_step = static_cast<float>(lr);
    c.average = Lerp::of(average);
    c.first = step == 1;
    return c;
  }
  LB_HD static void update(float g, float& p, float (&s)[2], const Coef& c) {
    g = g * c.g_scale;
    s[1] = s[1] * c.beta2 + (g * g) * c.one_minus_beta2;
    const float d = g / (__builtin_sqrtf(s[1]) * c.inv_sqrt_bc2 + c.eps) + c.weight_decay * p;
    const float z = c.first ? p : s[0];
    p = c.average(p, z) - c.y_step * d;
    s[0] = z - c.z_step * d;
  }
};

}  // namespace lowbit
