#include "cpu/matrices/row_moment.h"

#include <vector>

#include "core/muon/row_moment.h"

namespace lowbit::cpu {
namespace {

void normalize(uint16_t* x, float* moments, int64_t rows, int64_t cols, const Lerp& average,
               const Parallel& parallel) {
  std::vector<double> squares(static_cast<size_t>(rows));
  double* const of_row = squares.data();
  parallel(rows, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) of_row[r] = row_squares(x + r * cols, cols);
  });
  double before = 0.0, after = 0.0;
  for (int64_t r = 0; r < rows; ++r) {
    moments[r] = row_moment(moments[r], of_row[r], cols, average);
    const double scale = row_scale(moments[r]);
    before = before + of_row[r];
    after = after + scale * scale * of_row[r];
  }
  const double rescale = row_rescale(before, after);
  parallel(rows, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const auto factor = static_cast<float>(row_scale(moments[r]) * rescale);
      for (int64_t k = r * cols; k < (r + 1) * cols; ++k) x[k] = row_value(x[k], factor);
    }
  });
}

}  // namespace

void normalize_rows(uint16_t* x, float* moments, int64_t count, int64_t rows, int64_t cols,
                    double beta2, const Parallel& parallel) {
  const Lerp average = Lerp::of(1.0 - beta2);
  for (int64_t i = 0; i < count; ++i)
    normalize(x + i * rows * cols, moments + i * rows, rows, cols, average, parallel);
}

}  // namespace lowbit::cpu
