// CAME (arXiv:2307.02047): Adafactor's direction with momentum, divided by the confidence in it.
//
//   R, C   = row and column means of g^2 + eps1 with weight 1 - beta2;  v = R * C / mean(R)
//   u  = g / sqrt(v);  u = u / max(1, RMS(u) / d)
//   m  = m + (u - m) * (1 - beta1)
//   R', C' = row and column means of (u - m)^2 + eps2 with weight 1 - beta3
//   w  = R' * C' / mean(R')
//   p  = p * (1 - lr * weight_decay)
//   p  = p - lr * m / sqrt(w)
//
// In one dimension v = v + (g^2 + eps1 - v) * (1 - beta2), a state tensor, and p = p - lr * m.
#pragma once

#include <cstdint>

#include "core/update/rule.h"

namespace lowbit {

template <bool kFactored>
struct CameRule {
  static constexpr const char* kName = kFactored ? "came" : "came_full";
  static constexpr int kSlots = kFactored ? 1 : 2;
  static constexpr Slot kSlot[2] = {{"exp_avg", true}, {"exp_avg_sq", false}};
  static constexpr int kFactors = kFactored ? 2 : 0;
  static constexpr const char* kFactor[2] = {"exp_avg_sq", "exp_avg_res"};
  static constexpr int kHypers = 8;
  static constexpr const char* kHyper[kHypers] = {"lr",   "beta1", "beta2", "beta3",
                                                  "eps1", "eps2",  "d",     "weight_decay"};
  static constexpr int kRounds = kFactored ? 3 : 1;
  static constexpr int kClip = kFactored ? 1 : 0;  // the round that sums u^2
  LB_HD static constexpr int grid_factor(int round) {
    return !kFactored || round == 1 ? -1 : round / 2;
  }
  LB_HD static constexpr int totals(int round) { return round == kClip ? 1 : 0; }
  LB_HD static constexpr int reads(int round) {
    if (!kFactored) return kReadsState;
    return (round > 0 ? kReadsFactors : 0) | (round == 2 ? kReadsState : 0);
  }

  struct Coef {
    double d;
    float g_scale, one_minus_beta1, one_minus_beta2, one_minus_beta3, eps1, eps2, decay, lr, clip;
  };
  LB_HD static Coef prepare(const double* hyper, int64_t, double g_scale) {
    Coef c{};
    c.d = hyper[6];
    c.g_scale = static_cast<float>(g_scale);
    c.one_minus_beta1 = static_cast<float>(1.0 - hyper[1]);
    c.one_minus_beta2 = static_cast<float>(1.0 - hyper[2]);
    c.one_minus_beta3 = static_cast<float>(1.0 - hyper[3]);
    c.eps1 = static_cast<float>(hyper[4]), c.eps2 = static_cast<float>(hyper[5]);
    c.decay = static_cast<float>(1.0 - hyper[0] * hyper[7]);
    c.lr = static_cast<float>(hyper[0]);
    c.clip = 1.0f;
    return c;
  }
  LB_HD static float factor_weight(int k, const Coef& c) {
    return k == 0 ? c.one_minus_beta2 : c.one_minus_beta3;
  }
  LB_HD static float min_mean(int, const Coef&) { return 0.0f; }

  /// The product of a row's factor and a column's. Both are tiny where a gradient has a row and a
  /// column of zeros, and so is their root's; a product of 0 would divide 0 by 0.
  LB_HD static float product(float row, float col) {
    const float v = row * col;
    return v < 0x1p-126f ? 0x1p-126f : v;  // NaN stays
  }

  /// u before clipping. Clipping multiplies it by the factor that round kClip computes.
  LB_HD static float direction(float g, float* s, const float* f, const Coef& c) {
    float v;
    if constexpr (kFactored) {
      v = product(f[0], f[1]);
    } else {
      s[1] = s[1] + ((g * g + c.eps1) - s[1]) * c.one_minus_beta2;
      v = s[1];
    }
    return g / __builtin_sqrtf(v) * c.clip;
  }

  template <int kRound>
  LB_HD static void measure(float g, float, float* s, const float* f, const Coef& c, float& grid,
                            float* totals) {
    g = g * c.g_scale;
    if constexpr (kFactored && kRound == 0) {
      grid = g * g + c.eps1;
    } else {
      const float u = direction(g, s, f, c);
      totals[0] = u * u;
      if constexpr (kRound == 2) {
        const float m = s[0] + (u - s[0]) * c.one_minus_beta1;
        grid = (u - m) * (u - m) + c.eps2;
      }
    }
  }

  LB_HD static void finalize(int round, const double* totals, double numel, float*, Coef& c) {
    if (round != kClip) return;
    const double over = __builtin_sqrt(totals[0] / numel) / c.d;
    c.clip = static_cast<float>(over > 1.0 || over != over ? 1.0 / over : 1.0);
  }

  /// Moves the first moment toward u.
  LB_HD static void move(float u, float& m, const Coef& c) { m = m + (u - m) * c.one_minus_beta1; }

  LB_HD static void update(float g, float& p, float* s, const float* f, const Coef& c) {
    move(direction(g * c.g_scale, s, f, c), s[0], c);
    float step = s[0];
    if constexpr (kFactored) step = step / __builtin_sqrtf(product(f[2], f[3]));
    p = p * c.decay;
    p = p - c.lr * step;
  }
  LB_HD static void update(float g, float& p, float* s, const Coef& c) {
    update(g, p, s, nullptr, c);
  }
};

using Came = CameRule<true>;
using CameFull = CameRule<false>;

}  // namespace lowbit
