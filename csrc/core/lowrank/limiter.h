// The norm-growth limiter of Fira (arXiv:2410.01623, section 4.3), also used by APOLLO and
// Adafactor: the norm of an update grows by at most the factor gamma per step.
//
//   first time:   divisor = 1,                                            previous = norm
//   later:        divisor = max(norm / (previous + 1e-8), gamma) / gamma, previous = norm / divisor
//
// in double. Two rules go beyond the paper. A previous norm below `minimum` counts as none, so a
// parameter whose gradient was zero for a while is not held near zero. A norm that is not finite
// gives divisor 1 and leaves the state unchanged. For Adafactor's margin, gamma = 1 + margin.
#pragma once

#include "core/macros.h"

namespace lowbit {

struct Limiter {
  double gamma = 1.01;
  double minimum = 1e-6;

  /// `previous` is the state: 0, or anything below `minimum`, before the first step.
  LB_HD double divisor(double norm, double& previous) const {
    if (!(norm - norm == 0.0)) return 1.0;
    if (!(previous >= minimum)) {
      previous = norm;
      return 1.0;
    }
    const double growth = norm / (previous + 1e-8);
    const double divisor = (growth > gamma ? growth : gamma) / gamma;
    previous = norm / divisor;
    return divisor;
  }
};

}  // namespace lowbit
