// Adagrad (Duchi et al., 2011), as in torch.optim.Adagrad.
//
//   g   = g + weight_decay * p
//   sum = sum + g^2
//   p   = p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(sum) + eps)
//
// The numerator includes the decay, as the sum does. bitsandbytes' CUDA kernels omit it there.
#pragma once

#include <cstdint>

#include "core/update/rule.h"

namespace lowbit {

struct Adagrad {
  static constexpr const char* kName = "adagrad";
  static constexpr int kSlots = 1;
  static constexpr Slot kSlot[1] = {{"sum", false}};
  static constexpr int kHypers = 4;
  static constexpr const char* kHyper[kHypers] = {"lr", "lr_decay", "weight_decay", "eps"};

  struct Coef {
    float g_scale, weight_decay, eps, lr;
  };
  LB_HD static Coef prepare(const double* hyper, int64_t step, double g_scale) {
    Coef c;
    c.g_scale = static_cast<float>(g_scale);
    c.weight_decay = static_cast<float>(hyper[2]);
    c.eps = static_cast<float>(hyper[3]);
    c.lr = static_cast<float>(hyper[0] / (1.0 + static_cast<double>(step - 1) * hyper[1]));
    return c;
  }
  LB_HD static void update(float g, float& p, float (&s)[1], const Coef& c) {
    g = moments(g, p, s, c);
    p = p - c.lr * (g / (__builtin_sqrtf(s[0]) + c.eps));
  }
  /// The first half of `update`: adds to the sum, and returns the gradient with the decay.
  LB_HD static float moments(float g, float p, float (&s)[1], const Coef& c) {
    g = g * c.g_scale + c.weight_decay * p;
    s[0] = s[0] + g * g;
    return g;
  }
};

}  // namespace lowbit
