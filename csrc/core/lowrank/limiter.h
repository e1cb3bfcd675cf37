// The norm-growth limiter of Fira (arXiv:2410.01623, section 4.3), which APOLLO and Adafactor use
// too: the norm of an update may grow by the factor gamma a step.
//
//   first time:   divisor = 1,                                                   previous = norm
//   later:        divisor = max(norm / (previous + 1e-8), gamma) / gamma,        previous = norm /
//   divisor
//
// in double. Ours beyond that: a previous norm below `least` counts as none, so that a parameter
// whose gradient was zero for a while is not held near zero; and a norm that is not finite divides
// by 1 and leaves the state alone. For Adafactor's margin, gamma = 1 + margin.
#pragma once

#include "core/macros.h"

namespace lowbit {

struct Limiter {
  double gamma = 1.01;
  double least = 1e-6;

  /// `previous` is the state: 0 (or anything below `least`) before the first time.
  LB_HD double divisor(double norm, double& previous) const {
    if (!(norm - norm == 0.0)) return 1.0;
    if (!(previous >= least)) {
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
