// RMSprop as in torch.optim.RMSprop, plain or centered, with or without momentum.
//
//   g   = g + weight_decay * p
//   v   = alpha * v + (1 - alpha) * g^2
//   centered:  a = a + (g - a) * (1 - alpha),  root = sqrt(max(v - a^2, least_variance * v))
//   else:      root = sqrt(v)
//   u   = g / (root + eps)
//   momentum:  buf = momentum * buf + u,  u = buf
//   p   = p - lr * u
//
// v - a^2 is the difference of two numbers that are nearly equal if gradients hardly vary. In few
// bits each is off by a few percent, so the difference may come out zero or negative, and the step
// as g / eps. least_variance is the smallest share of v that the state format can resolve: 0 for
// float32.
//
// The numerator includes the decay, as v does. bitsandbytes' CUDA kernels omit it there.
#pragma once

#include <cstdint>

#include "core/update/rule.h"

namespace lowbit {

template <bool kCentered, bool kMomentum>
struct RmspropRule {
  static constexpr const char* kName =
      kCentered ? (kMomentum ? "rmsprop_centered_momentum" : "rmsprop_centered")
                : (kMomentum ? "rmsprop_momentum" : "rmsprop");
  static constexpr int kSlots = 1 + kCentered + kMomentum;
  static constexpr Slot kSlot[3] = {
      {"square_avg", false},
      kMomentum ? Slot{"momentum_buffer", true} : Slot{"grad_avg", true},
      {"grad_avg", true}};
  static constexpr int kHypers = 6;
  static constexpr const char* kHyper[kHypers] = {"lr",           "alpha",    "eps",
                                                  "weight_decay", "momentum", "least_variance"};

  struct Coef {
    float g_scale, weight_decay, alpha, one_minus_alpha, eps, momentum, min_variance, lr;
  };
  LB_HD static Coef prepare(const double* hyper, int64_t, double g_scale) {
    Coef c;
    c.g_scale = static_cast<float>(g_scale);
    c.weight_decay = static_cast<float>(hyper[3]);
    c.alpha = static_cast<float>(hyper[1]);
    c.one_minus_alpha = static_cast<float>(1.0 - hyper[1]);
    c.eps = static_cast<float>(hyper[2]);
    c.momentum = static_cast<float>(hyper[4]);
    c.min_variance = static_cast<float>(hyper[5]);
    c.lr = static_cast<float>(hyper[0]);
    return c;
  }
  LB_HD static void update(float g, float& p, float (&s)[kSlots], const Coef& c) {
    g = moments(g, p, s, c);
    float v = s[0];
    if constexpr (kCentered) {
      float& mean = s[kSlots - 1];
      mean = mean + (g - mean) * c.one_minus_alpha;
      const float variance = v - mean * mean, minimum = v * c.min_variance;
      v = variance < minimum ? minimum : variance;  // a NaN stays
    }
    float step = g / (__builtin_sqrtf(v) + c.eps);
    if constexpr (kMomentum) {
      s[1] = c.momentum * s[1] + step;
      step = s[1];
    }
    p = p - c.lr * step;
  }
  /// The first half of `update`: moves the second moment, and returns the gradient with the decay.
  LB_HD static float moments(float g, float p, float (&s)[kSlots], const Coef& c) {
    g = g * c.g_scale + c.weight_decay * p;
    s[0] = c.alpha * s[0] + c.one_minus_alpha * (g * g);
    return g;
  }
};

using Rmsprop = RmspropRule<false, false>;
using RmspropMomentum = RmspropRule<false, true>;
using RmspropCentered = RmspropRule<true, false>;
using RmspropCenteredMomentum = RmspropRule<true, true>;

}  // namespace lowbit
