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
#pragma once

#include <cstdint>

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

}  // namespace lowbit
