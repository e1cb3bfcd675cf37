// The step from a gradient to an update. The ratio of the low-rank step N to the low-rank gradient
// L scales the gradient, for each channel (a row if R >= C, a column if R < C) or for the whole
// tensor.
//
//   s = |N| / (|L| + 1e-8)                     in double, rounded to float32 once
//   u = g * s * front / divisor * after        front or after is sqrt(scale), the other one is 1
//   p = p - eta * u,   then   p = p - lr * weight_decay * p
//
//   Fira:   e = (g - alpha * (P L)) * s,   u = alpha * (P N) + e / divisor
//
// each operation of u and p in float32, rounded once. eta = lr * sqrt(1 - beta2^t) / (1 - beta1^t).
#pragma once

#include <cstdint>

#include "core/macros.h"
#include "core/power.h"

namespace lowbit {

/// The ratio of the norms, from the sums of squares of N and L.
LB_HD float norm_ratio(double step, double gradient) {
  return static_cast<float>(__builtin_sqrt(step) / (__builtin_sqrt(gradient) + 1e-8));
}

LB_HD double bias_corrected(double lr, double beta1, double beta2, int64_t step) {
  return lr * __builtin_sqrt(1.0 - power(beta2, step)) / (1.0 - power(beta1, step));
}

/// The factors of one parameter and step.
struct Scaling {
  float front = 1.0f, divisor = 1.0f, after = 1.0f;
  float alpha = 1.0f;  // for Fira
  float eta = 0.0f, decay = 0.0f;

  /// The update before the limiter, which reads its norm.
  LB_HD float unlimited(float g, float s) const { return g * s * front; }
  LB_HD float limited(float g, float s) const { return unlimited(g, s) / divisor * after; }

  LB_HD float residual(float g, float back, float s) const { return (g - alpha * back) * s; }
  LB_HD float joined(float back, float residual) const { return alpha * back + residual / divisor; }

  LB_HD float applied(float p, float u) const {
    const float q = p - eta * u;
    return q - decay * q;
  }
};

}  // namespace lowbit
