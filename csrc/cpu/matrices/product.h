// Matrix products of float32 in one fixed order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/bits.h"
#include "cpu/matrices/lowrank.h"

namespace lowbit::cpu {

inline int length(int64_t at, int64_t end, int limit) {
  return static_cast<int>(end - at < limit ? end - at : limit);
}

/// out[i][j] = sum_c a(i, c) b[c * b_row + j * b_col], c ascending, in double and rounded once, for
/// i in [begin, end), j < cols. a_load(i, c, n, out) loads n floats of row i.
template <class Load>
void product(Load&& a_load, const float* b, int64_t b_row, int64_t b_col, int64_t depth,
             int64_t cols, int64_t begin, int64_t end, float* out) {
  using K = LowRankKernels;
  const K& kernel = lowrank_kernels();
  const int64_t panels = ceil_div(cols, K::kWidth);
  std::vector<double> a(K::kRows * K::kDepth), panel(K::kDepth * K::kWidth),
      sums(static_cast<size_t>(panels * K::kRows * K::kWidth));
  for (int64_t row = begin; row < end; row += K::kRows) {
    const int rows = length(row, end, K::kRows);
    std::fill(sums.begin(), sums.end(), 0.0);
    for (int64_t at = 0; at < depth; at += K::kDepth) {
      const int deep = length(at, depth, K::kDepth);
      for (int i = 0; i < rows; ++i) {
        float line[K::kDepth];
        a_load(row + i, at, deep, line);
        kernel.widen(line, &a[static_cast<size_t>(i * K::kDepth)], deep);
      }
      for (int64_t q = 0; q < panels; ++q) {
        const int wide = length(q * K::kWidth, cols, K::kWidth);
        for (int c = 0; c < deep; ++c) {
          const float* from = b + (at + c) * b_row + q * K::kWidth * b_col;
          double* const to = &panel[static_cast<size_t>(c * K::kWidth)];
          for (int j = 0; j < wide; ++j) to[j] = static_cast<double>(from[j * b_col]);
          for (int j = wide; j < K::kWidth; ++j) to[j] = 0.0;
        }
        kernel.multiply(a.data(), panel.data(),
                        &sums[static_cast<size_t>(q * K::kRows * K::kWidth)], rows, deep, wide);
      }
    }
    for (int64_t q = 0; q < panels; ++q) {
      const int wide = length(q * K::kWidth, cols, K::kWidth);
      for (int i = 0; i < rows; ++i) {
        const double* sum = &sums[static_cast<size_t>((q * K::kRows + i) * K::kWidth)];
        float* const to = out + (row + i) * cols + q * K::kWidth;
        for (int j = 0; j < wide; ++j) to[j] = canonical(static_cast<float>(sum[j]));
      }
    }
  }
}

}  // namespace lowbit::cpu
