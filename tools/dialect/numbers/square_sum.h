// The 2-norm of many numbers, whatever their size.
#pragma once

#include <cmath>

namespace lowbit::ckpt {

/// Adds up squares. Those of very large and very small numbers, which a double cannot hold, are
/// added apart, scaled by powers of two.
class SquareSum {
 public:
  void add(double x) {
    const double magnitude = std::fabs(x);
    if (magnitude < kSmall) {
      small_ += x * kUp * (x * kUp);
    } else if (magnitude > kLarge) {
      large_ += x * kDown * (x * kDown);
    } else {
      sum_ += x * x;
    }
  }
  /// The root of the sum over `count`: 1 gives the norm, the number of values their root mean
  /// square. NaN where one of them was.
  double root(double count = 1) const {
    if (std::isnan(sum_)) return sum_;
    if (large_ > 0) return std::sqrt(large_ / count) * kUp;
    if (sum_ > 0) return std::sqrt(sum_ / count);
    return std::sqrt(small_ / count) * kDown;
  }

 private:
  static constexpr double kUp = 0x1p600, kDown = 0x1p-600, kLarge = 0x1p480, kSmall = 0x1p-480;
  double small_ = 0, sum_ = 0, large_ = 0;
};

}  // namespace lowbit::ckpt
