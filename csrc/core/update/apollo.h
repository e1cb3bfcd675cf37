// The step of APOLLO (arXiv:2412.05270) and Fira (arXiv:2410.01623) inside the subspace: Adam's
// moments of the low-rank gradient. eps is added to the uncorrected root, and there is no step: the
// result written to the "parameter" is the direction N itself. Bias correction is a factor of the
// outer step (core/lowrank/scaling.h).
//
//   g = g * g_scale          (1 where the projection has multiplied it already)
//   m = m * beta1 + g * (1 - beta1)
//   v = v * beta2 + g^2 * (1 - beta2)
//   p = m / (sqrt(v) + eps)
//
// in float32, each operation rounded once and never fused.
//
// ApolloAdafactor is the same for Adafactor (as in adafactor-8bit 0.1.9): no first moment, eps
// inside the root, and a second moment that restarts with every projection.
//
//   b = t^beta2_decay, or 1 - beta2 where beta2 is given                weight of this sample
//   v = g^2                                 in the first step of a projection
//   v = v + b * (g^2 - v)                   in the others
//   p = g / sqrt(v + eps)
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/explog.h"
#include "core/macros.h"
#include "core/update/rule.h"

namespace lowbit {

struct ApolloInner {
  static constexpr const char* kName = "apollo_inner";
  static constexpr int kSlots = 2;
  static constexpr Slot kSlot[2] = {{"exp_avg", true}, {"exp_avg_sq", false}};
  static constexpr int kHypers = 4;
  static constexpr const char* kHyper[kHypers] = {"lr", "beta1", "beta2", "eps"};

  struct Coef {
    float g_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  };

  LB_HD static Coef prepare(const double* hyper, int64_t, double g_scale) {
    Coef c;
    c.g_scale = static_cast<float>(g_scale);
    c.beta1 = static_cast<float>(hyper[1]);
    c.one_minus_beta1 = static_cast<float>(1.0 - hyper[1]);
    c.beta2 = static_cast<float>(hyper[2]);
    c.one_minus_beta2 = static_cast<float>(1.0 - hyper[2]);
    c.eps = static_cast<float>(hyper[3]);
    return c;
  }

  LB_HD static void update(float g, float& p, float (&s)[kSlots], const Coef& c) {
    g = g * c.g_scale;
    s[0] = s[0] * c.beta1 + g * c.one_minus_beta1;
    s[1] = s[1] * c.beta2 + (g * g) * c.one_minus_beta2;
    p = s[0] / (__builtin_sqrtf(s[1]) + c.eps);
  }
};

struct ApolloAdafactor {
  static constexpr const char* kName = "apollo_adafactor";
  static constexpr int kSlots = 1;
  static constexpr Slot kSlot[1] = {{"variance", false}};
  static constexpr int kHypers = 5;
  static constexpr const char* kHyper[kHypers] = {"lr", "beta2_decay", "beta2", "eps",
                                                  "update_proj_gap"};

  struct Coef {
    float g_scale, weight, eps;
    uint32_t begins;  // all ones if this step has a new projection, else zero
  };

  /// A negative beta2 means not given.
  LB_HD static Coef prepare(const double* hyper, int64_t step, double g_scale) {
    const double beta2 = hyper[2];
    const auto gap = static_cast<int64_t>(hyper[4]);
    Coef c;
    c.g_scale = static_cast<float>(g_scale);
    c.weight = static_cast<float>(beta2 >= 0.0 ? 1.0 - beta2
                                               : power_of(static_cast<double>(step), hyper[1]));
    c.eps = static_cast<float>(hyper[3]);
    c.begins = step <= 1 || (gap >= 1 && (step - 1) % gap == 0) ? ~0u : 0u;
    return c;
  }

  LB_HD static void update(float g, float& p, float (&s)[kSlots], const Coef& c) {
    g = g * c.g_scale;
    const float square = g * g, moved = s[0] + c.weight * (square - s[0]);
    s[0] = select(c.begins, square, moved);  // not even a NaN is carried over
    p = g / __builtin_sqrtf(s[0] + c.eps);
  }
};

}  // namespace lowbit
