// exp, log and powers against libm in long double, in the range of hyperparameters.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

#include "check.h"
#include "core/explog.h"

namespace {

void check(long double worst, const char* what) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2Le", worst);
  ::check(worst < 1e-15L, std::string(what) + ": relative error " + text);
}

long double error(double got, long double want) {
  return got == static_cast<double>(want) ? 0.0L : std::fabs((got - want) / want);
}

}  // namespace

int main() {
  using namespace lowbit;
  std::mt19937_64 random(20240229);
  std::uniform_real_distribution<double> one(0.0, 1.0);
  long double log = 0.0L, near = 0.0L, exp = 0.0L, power = 0.0L;
  for (int i = 0; i < 200000; ++i) {
    const double x = std::ldexp(1.0 + one(random), static_cast<int>(random() % 2040) - 1020);
    log = std::max(log, error(log_of(x), std::log(static_cast<long double>(x))));
    // decays: near 1, where the logarithm is small
    const double beta = 1.0 - std::ldexp(one(random), -static_cast<int>(random() % 40));
    if (beta > 0.0)
      near = std::max(near, error(log_of(beta), std::log(static_cast<long double>(beta))));
    const double y = (one(random) - 0.5) * (i % 2 ? 1400.0 : 4.0);
    exp = std::max(exp, error(exp_of(y), std::exp(static_cast<long double>(y))));
    // t^-0.8 of Adafactor
    const double t = 1.0 + std::floor(one(random) * 1e6), decay = -one(random);
    power =
        std::max(power, error(power_of(t, decay), std::pow(static_cast<long double>(t), decay)));
  }
  check(log, "log");
  check(near, "log of decays");
  check(exp, "exp");
  check(power / 16.0L, "power / 16");  // the error of y ln x grows with the power
  check(log_of(1.0) == 0.0 && exp_of(0.0) == 1.0 && exp_of(-1e4) == 0.0 ? 0.0L : 1.0L, "ends");
  return finish();
}
