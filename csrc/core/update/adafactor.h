// Adafactor (arXiv:1804.04235) as torch.optim.Adafactor and adafactor-8bit define it.
//
//   b  = t^beta2_decay, or 1 - beta2 where beta2 is given              weight of this sample
//   rho = min(lr, 1 / sqrt(t)) with relative_step, else lr
//   alpha = max(eps2, RMS(p)) * rho with scale_parameter, else rho
//   p  = p * (1 - weight_decay * {lr | rho | alpha})
//   two or more dimensions:  R, C = row and column means of g^2 (+ eps1 where it is added) with
//                            weight b;  v = R * C / max(mean(R), eps1)
//   one dimension:           v = v + (g^2 - v) * b                     (a state tensor)
//   m  = m + (g - m) * (1 - beta1)          only with momentum; else m = g
//   u  = m / sqrt(max(v, eps1^2))           bias-corrected where asked for (momentum, no
//                                           relative_step)
//   n  = |u|;  with a margin (Fira's norm-growth limiter, arXiv:2410.01623):
//        s = 1 / (max(n / (n_before + 1e-8), 1 + margin) / (1 + margin)), 1 in the first step;
//        n = n * s = n_before of the next step;  u = u * s
//   p  = p - alpha / max(1, n / (sqrt(numel) * d)) * u
#pragma once

#include <cstdint>

#include "core/explog.h"
#include "core/power.h"
#include "core/update/rule.h"

namespace lowbit {

template <bool kFactored, bool kMomentum>
struct AdafactorRule {
  static constexpr const char* kName =
      kFactored ? (kMomentum ? "adafactor_momentum" : "adafactor")
                : (kMomentum ? "adafactor_full_momentum" : "adafactor_full");
  static constexpr int kSlots = (kMomentum ? 1 : 0) + (kFactored ? 0 : 1);
  static constexpr Slot kSlot[2] = {kMomentum ? Slot{"exp_avg", true} : Slot{"variance", false},
                                    {"variance", false}};
  static constexpr int kFactors = kFactored ? 1 : 0;
  static constexpr const char* kFactor[1] = {"variance"};
  static constexpr int kNumbers = 1;
  static constexpr const char* kNumber = "update_norm";
  static constexpr int kHypers = 13;
  static constexpr const char* kHyper[kHypers] = {"lr",
                                                  "beta2_decay",
                                                  "beta2",
                                                  "beta1",
                                                  "eps1",
                                                  "eps2",
                                                  "d",
                                                  "weight_decay",
                                                  "decay_by",
                                                  "relative_step",
                                                  "scale_parameter",
                                                  "fira_margin",
                                                  "add_eps"};
  static constexpr int kRounds = kFactored ? 2 : 1;
  static constexpr int kLast = kRounds - 1;  // the round that has the update
  LB_HD static constexpr int grid_factor(int round) { return kFactored && round == 0 ? 0 : -1; }
  LB_HD static constexpr int totals(int round) { return round == kLast && !kFactored ? 2 : 1; }
  LB_HD static constexpr int reads(int round) {
    return (round == 0 ? kReadsParam : 0) | (round == kLast ? kReadsState | kReadsFactors : 0);
  }

  struct Coef {
    double rho, alpha, eps2, d, weight_decay, margin, lr;
    float g_scale, weight, one_minus_beta1, eps1, added, minimum, m_scale, v_scale, decay, step;
    int decay_by, scale_parameter;
  };

  /// decay_by: 0 lr, 1 rho, 2 alpha. A negative beta1 or beta2 means not given. d <= 0 means no
  /// clipping, and fira_margin < 0 no limiter. With add_eps, eps1 is added to g^2.
  LB_HD static Coef prepare(const double* hyper, int64_t step, double g_scale) {
    const double lr = hyper[0], beta2 = hyper[2], beta1 = hyper[3], eps1 = hyper[4];
    const bool relative = hyper[9] != 0.0;
    const double t = static_cast<double>(step);
    Coef c{};
    c.lr = lr;
    c.rho = relative && 1.0 / __builtin_sqrt(t) < lr ? 1.0 / __builtin_sqrt(t) : lr;
    c.eps2 = hyper[5], c.d = hyper[6], c.weight_decay = hyper[7];
    c.decay_by = static_cast<int>(hyper[8]);
    c.scale_parameter = hyper[10] != 0.0;
    c.margin = hyper[11];
    c.g_scale = static_cast<float>(g_scale);
    c.weight = static_cast<float>(beta2 >= 0.0 ? 1.0 - beta2 : power_of(t, hyper[1]));
    c.one_minus_beta1 = static_cast<float>(1.0 - beta1);
    c.eps1 = static_cast<float>(eps1);
    c.added = hyper[12] != 0.0 ? c.eps1 : 0.0f;
    const double minimum = eps1 * eps1;
    c.minimum = static_cast<float>(minimum < 0x1p-126 ? 0x1p-126 : minimum);
    const bool corrected = kMomentum && beta1 >= 0.0 && beta2 >= 0.0 && !relative;
    c.m_scale = static_cast<float>(corrected ? 1.0 / (1.0 - power(beta1, step)) : 1.0);
    c.v_scale = static_cast<float>(corrected ? 1.0 / (1.0 - power(beta2, step)) : 1.0);
    return c;
  }

  LB_HD static float factor_weight(int, const Coef& c) { return c.weight; }
  LB_HD static float min_mean(int, const Coef& c) { return c.eps1; }

  /// Updates the state and returns the direction of the update.
  LB_HD static float direction(float g, float* s, const float* f, const Coef& c) {
    float v;
    g = moments(g, s, f, c, v);
    return g / __builtin_sqrtf(v);
  }
  /// The same without division and root: returns the numerator, and v, of which the root divides
  /// it.
  LB_HD static float moments(float g, float* s, const float* f, const Coef& c, float& v) {
    if constexpr (kFactored) {
      v = f[0] * f[1];
    } else {
      float& kept = s[kMomentum ? 1 : 0];
      kept = kept + c.weight * ((g * g + c.added) - kept);
      v = kept;
    }
    if constexpr (kMomentum) {
      s[0] = s[0] + (g - s[0]) * c.one_minus_beta1;
      g = s[0] * c.m_scale;
    }
    v = v * c.v_scale;
    v = v < c.minimum ? c.minimum : v;  // a NaN stays
    return g;
  }

  template <int kRound>
  LB_HD static void measure(float g, float p, float* s, const float* f, const Coef& c, float& grid,
                            float* totals) {
    g = g * c.g_scale;
    if constexpr (kRound == 0) {
      grid = g * g + c.added;
      totals[0] = p * p;
    }
    if constexpr (kRound == kLast) {
      const float u = direction(g, s, f, c);
      totals[kFactored ? 0 : 1] = u * u;
    }
  }

  LB_HD static void finalize(int round, const double* totals, double numel, float* numbers,
                             Coef& c) {
    if (round == 0) {
      double alpha = c.rho;
      if (c.scale_parameter) {
        const double rms = __builtin_sqrt(totals[0] / numel);
        alpha *= rms < c.eps2 ? c.eps2 : rms;
      }
      c.alpha = alpha;
      const double by = c.decay_by == 0 ? c.lr : c.decay_by == 1 ? c.rho : alpha;
      c.decay = static_cast<float>(1.0 - c.weight_decay * by);
    }
    if (round != kLast) return;
    double n = __builtin_sqrt(totals[kFactored ? 0 : 1]), limit = 1.0;
    if (c.margin >= 0.0) {
      const double before = static_cast<double>(numbers[0]), maximum = 1.0 + c.margin;
      const double growth = n / (before + 1e-8);
      if (before != 0.0 && growth > maximum) limit = maximum / growth;
      n *= limit;
      numbers[0] = static_cast<float>(n);
    }
    const double clip = c.d > 0.0 ? n / (__builtin_sqrt(numel) * c.d) : 0.0;
    c.step = static_cast<float>(c.alpha * limit / (clip > 1.0 || clip != clip ? clip : 1.0));
  }

  LB_HD static void update(float g, float& p, float* s, const float* f, const Coef& c) {
    const float u = direction(g * c.g_scale, s, f, c);
    p = p * c.decay;
    p = p - c.step * u;
  }
  LB_HD static void update(float g, float& p, float* s, const Coef& c) {
    update(g, p, s, nullptr, c);
  }
};

using Adafactor = AdafactorRule<true, false>;
using AdafactorFull = AdafactorRule<false, false>;
using AdafactorMomentum = AdafactorRule<true, true>;
using AdafactorFullMomentum = AdafactorRule<false, true>;

}  // namespace lowbit
