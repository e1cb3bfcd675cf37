// The second moment of each row in NorMuon (Li et al., 2025, arXiv:2510.05491, with the rescaling
// of the authors' code): rows of the orthogonalized update O get like sizes, and its norm stays.
//
//   v_r = lerp(v_r, mean over k of O_rk^2, 1 - beta2)
//   s_r = 1 / (sqrt(v_r) + 1e-10)
//   X_rk = O_rk (s_r |O| / (|s O| + 1e-10))        |s O|^2 = sum over r of s_r^2 |O_r|^2
//
// v and s are float32. Sums are double chains: a row's over ascending k, a matrix's over ascending
// r. The factor in parentheses is rounded once to float32, and X once to bfloat16.
#pragma once

#include <cstdint>

#include "core/macros.h"
#include "core/param/bfloat16.h"
#include "core/update/muon.h"

namespace lowbit {

constexpr double kRowFloor = 1e-10;

/// |O_r|^2 of a row of bfloat16 values. Every square is exact.
LB_HD double row_squares(const uint16_t* row, int64_t cols) {
  double sum = 0.0;
  for (int64_t k = 0; k < cols; ++k) {
    const double x = bfloat16_to_float(row[k]);
    sum = sum + x * x;
  }
  return sum;
}

/// v_r after this step.
LB_HD float row_moment(float before, double squares, int64_t cols, const Lerp& average) {
  return average(before, static_cast<float>(squares / static_cast<double>(cols)));
}

/// s_r.
LB_HD float row_scale(float moment) {
  return 1.0f / (__builtin_sqrtf(moment) + static_cast<float>(kRowFloor));
}

/// |O| / (|s O| + 1e-10), from the sums of both squares.
LB_HD double row_rescale(double squares, double scaled) {
  return __builtin_sqrt(squares) / (__builtin_sqrt(scaled) + kRowFloor);
}

/// X_rk, of the row's factor.
LB_HD uint16_t row_value(uint16_t o, float factor) {
  return bfloat16_nearest(bfloat16_to_float(o) * factor);
}

}  // namespace lowbit
