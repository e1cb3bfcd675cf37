// SGD with momentum, dampening and Nesterov's variant, as in torch.optim.SGD; decay coupled (L2) or
// decoupled.
//
//   coupled:    d = g + weight_decay * p
//   decoupled:  d = g,  p = p * (1 - lr * weight_decay)
//   momentum:   buf = d at t = 1 (torch);  else, and with dampen_first always (FlashOptim),
//               buf = momentum * buf + (1 - dampening) * d
//   p = p - lr * buf, with nesterov lr * (d + momentum * buf), without momentum lr * d
#pragma once

#include <cstdint>

#include "core/update/rule.h"

namespace lowbit {

template <bool kMomentum>
struct SgdRule {
  static constexpr const char* kName = kMomentum ? "sgd_momentum" : "sgd";
  static constexpr const char* kCautiousName = "cautious_sgd_momentum";
  static constexpr int kSlots = kMomentum ? 1 : 0;
  static constexpr Slot kSlot[1] = {{"momentum_buffer", true}};
  static constexpr int kHypers = 7;
  static constexpr const char* kHyper[kHypers] = {
      "lr", "momentum", "dampening", "nesterov", "weight_decay", "decoupled", "dampen_first"};

  struct Coef {
    float g_scale, decay, weight_decay, momentum, fresh, nesterov, lr;
  };
  LB_HD static Coef prepare(const double* hyper, int64_t step, double g_scale) {
    const bool decoupled = hyper[5] != 0.0, dampened = step > 1 || hyper[6] != 0.0;
    Coef c;
    c.g_scale = static_cast<float>(g_scale);
    c.decay = static_cast<float>(decoupled ? 1.0 - hyper[0] * hyper[4] : 1.0);
    c.weight_decay = static_cast<float>(decoupled ? 0.0 : hyper[4]);
    c.momentum = static_cast<float>(hyper[1]);
    c.fresh = static_cast<float>(dampened ? 1.0 - hyper[2] : 1.0);
    c.nesterov = hyper[3] != 0.0 ? 1.0f : 0.0f;
    c.lr = static_cast<float>(hyper[0]);
    return c;
  }
  LB_HD static void update(float g, float& p, Values<SgdRule>& s, const Coef& c) {
    const float step = direction(g, p, s, c, g);
    p = p - c.lr * step;
  }

  // The step before the learning rate; also for core/update/cautious.h.
  LB_HD static float direction(float g, float& p, Values<SgdRule>& s, const Coef& c, float& along) {
    const float d = g * c.g_scale + c.weight_decay * p;
    along = d;
    float step = d;
    if constexpr (kMomentum) {
      s[0] = c.momentum * s[0] + c.fresh * d;
      step = c.nesterov != 0.0f ? d + c.momentum * s[0] : s[0];
    }
    p = p * c.decay;
    return step;
  }
  LB_HD static float rate(const Coef& c) { return c.lr; }
};

using Sgd = SgdRule<false>;
using SgdMomentum = SgdRule<true>;

}  // namespace lowbit
