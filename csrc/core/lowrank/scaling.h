// What turns a gradient into an update: how much larger the low-rank step N is than the low-rank
// gradient L, over a channel (a row where R >= C, a column where R < C) or the whole.
//
//   s = |N| / (|L| + 1e-8)                          in double, rounded to float32 once
//   u = g * s * front / divisor * after             front, after: sqrt(scale) in one of the two
//   places p = p - eta * u,   then   p = p - lr * weight_decay * p
//
//   Fira:   e = (g - alpha * (P L)) * s,   u = alpha * (P N) + e / divisor
//
// each operation of u and p in float32, rounded once. eta = lr * sqrt(1 - beta2^t) / (1 - beta1^t).
#pragma once

#include <cstdint>

#include "core/macros.h"
#include "core/power.h"

namespace lowbit {

/// Of the sums of squares of N and L.
LB_HD float norm_ratio(double step, double gradient) {
  return static_cast<float>(__builtin_sqrt(step) / (__builtin_sqrt(gradient) + 1e-8));
}

LB_HD double bias_corrected(double lr, double beta1, double beta2, int64_t step) {
  return lr * __builtin_sqrt(1.0 - power(beta2, step)) / (1.0 - power(beta1, step));
}

/// Once per parameter and step.
struct Scaling {
  float front = 1.0f, divisor = 1.0f, after = 1.0f;
  float alpha = 1.0f;  // Fira
  float eta = 0.0f, decay = 0.0f;

  /// Before the limiter: its norm is what the limiter is asked about.
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
