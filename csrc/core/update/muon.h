// The elementwise halves of Muon (K. Jordan, 2024; torch.optim.Muon). Between them the update is
// orthogonalized: core/muon/newton_schulz.h.
//
// MuonMomentum is torch's running average, which other implementations keep as a sum (that times 1
// - momentum is the average). Its result U is written to the "parameter", so there is no learning
// rate.
//
//   m = lerp(m, g, 1 - momentum)
//   U = m, with nesterov lerp(g, m, momentum)
//   lerp(a, b, w) = a + w (b - a) if w < 1/2, else b + (w - 1) (b - a)      as in torch
//
// Muon steps by the orthogonalized update O, which takes the gradient's place:
//
//   p = p * (1 - lr * weight_decay)
//   p = p - lr * ratio * O         ratio: of the shape, core has none
//
// Cautious weight decay (arXiv:2510.12402) leaves out the first line where O p < 0: there the step
// itself goes towards 0.
//
// All in float32, each operation rounded once and never fused.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/macros.h"
#include "core/update/rule.h"

namespace lowbit {

/// The weight of torch's lerp, on whichever side it is the smaller.
struct Lerp {
  float weight;
  bool from_end;

  LB_HD static Lerp of(double w) {
    const auto weight = static_cast<float>(w);
    const bool from_end = !(weight < 0.5f);
    return {from_end ? weight - 1.0f : weight, from_end};
  }
  LB_HD float operator()(float a, float b) const { return (from_end ? b : a) + weight * (b - a); }
};

struct MuonMomentum {
  static constexpr const char* kName = "muon_momentum";
  static constexpr int kSlots = 1;
  static constexpr Slot kSlot[1] = {{"momentum_buffer", true}};
  static constexpr int kHypers = 3;
  static constexpr const char* kHyper[kHypers] = {"lr", "momentum", "nesterov"};

  struct Coef {
    float g_scale;
    Lerp average, ahead;  // ahead: weight 1 without nesterov
  };
  LB_HD static Coef prepare(const double* hyper, int64_t, double g_scale) {
    Coef c;
    c.g_scale = static_cast<float>(g_scale);
    c.average = Lerp::of(1.0 - hyper[1]);
    c.ahead = Lerp::of(hyper[2] != 0.0 ? hyper[1] : 1.0);
    return c;
  }
  LB_HD static void update(float g, float& p, float (&s)[1], const Coef& c) {
    g = g * c.g_scale;
    s[0] = c.average(s[0], g);
    p = c.ahead(g, s[0]);
  }
};

struct Muon {
  static constexpr const char* kName = "muon";
  static constexpr int kSlots = 0;
  static constexpr Slot kSlot[1] = {};
  static constexpr int kHypers = 4;
  static constexpr const char* kHyper[kHypers] = {"lr", "weight_decay", "ratio", "cautious"};

  struct Coef {
    float g_scale, decay, against, lr;  // against: the decay where O p < 0
  };
  LB_HD static Coef prepare(const double* hyper, int64_t, double g_scale) {
    Coef c;
    c.g_scale = static_cast<float>(g_scale);
    c.decay = static_cast<float>(1.0 - hyper[0] * hyper[1]);
    c.against = hyper[3] != 0.0 ? 1.0f : c.decay;
    c.lr = static_cast<float>(hyper[0] * hyper[2]);
    return c;
  }
  LB_HD static void update(float g, float& p, Values<Muon>&, const Coef& c) {
    g = g * c.g_scale;
    p = p * where_same_sign(g, -p, c.against, c.decay);
    p = p - c.lr * g;
  }
};

}  // namespace lowbit
