// The leading singular vectors of a gradient.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "cpu/matrices/lowrank.h"
#include "cpu/matrices/subspace.h"
#include "lowrank/lowrank.h"

using namespace lowbit;

namespace {

/// A rows x cols matrix with singular values decreasing by the factor `fall`, plus a part outside
/// any subspace.
std::vector<float> falling(int64_t rows, int64_t cols, int terms, double fall) {
  std::vector<float> g = normals(rows * cols, 1e-6f);
  double size = 1.0;
  for (int t = 0; t < terms; ++t, size *= fall) {
    const auto u = normals(rows, 1.0f), v = normals(cols, 1.0f);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        g[static_cast<size_t>(i * cols + j)] +=
            static_cast<float>(size) * u[static_cast<size_t>(i)] * v[static_cast<size_t>(j)];
      }
    }
  }
  return g;
}

}  // namespace

/// The Gram matrix split in several ways; A v = lambda v, orthonormal vectors, descending values,
/// and the same bits everywhere.
void check_subspace(const std::string& isa, std::vector<std::vector<float>>& first) {
  struct Shape {
    int64_t rows, cols, rank;
  };
  size_t which = 0;
  random_engine.seed(5);
  for (const Shape shape : {Shape{5, 9, 3}, Shape{40, 70, 8}, Shape{130, 37, 37}, Shape{64, 64, 5},
                            Shape{540, 560, 6}}) {
    const bool tall = shape.rows >= shape.cols;
    const int64_t n = std::min(shape.rows, shape.cols);
    const auto values =
        falling(shape.rows, shape.cols, n > 512 ? 12 : static_cast<int>(n), n > 512 ? 0.4 : 0.9);
    const cpu::GradRows g{values.data(), 0, shape.rows, shape.cols, 2.0f};
    std::vector<double> a(static_cast<size_t>(n * n)), b(a.size());
    cpu::gram(g, tall, 0, n, a.data());
    const int64_t cut = n / 3 + 1;
    cpu::gram(g, tall, 0, cut, b.data());
    cpu::gram(g, tall, cut, n, b.data());
    check(a == b, isa + " gram in parts");
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j <= i && n < 200; ++j) {
        double sum = 0.0;
        for (int64_t c = 0; c < (tall ? shape.rows : shape.cols); ++c) {
          const auto at = [&](int64_t x) {
            return static_cast<double>(
                2.0f * values[static_cast<size_t>(tall ? c * shape.cols + x : x * shape.cols + c)]);
          };
          sum += at(i) * at(j);
        }
        check(a[static_cast<size_t>(i * n + j)] == sum, isa + " gram");
      }
    }
    std::vector<float> p(static_cast<size_t>(n * shape.rank));
    const auto backwards = [](int64_t count, const cpu::Body& body) {
      for (int64_t end = count; end > 0; end -= std::min<int64_t>(end, 7)) {
        body(std::max<int64_t>(0, end - 7), end);
      }
    };
    std::vector<float> other(p.size());
    auto copy = b;
    check(cpu::leading_vectors(b.data(), n, shape.rank, p.data()) &&
              cpu::leading_vectors(copy.data(), n, shape.rank, other.data(), backwards),
          isa + " leading vectors");
    check(same(p, other), isa + " leading vectors in parts");
    double before = 1e300, largest = 0.0, worst = 0.0, skew = 0.0;
    bool falls = true;
    for (int64_t k = 0; k < shape.rank; ++k) {
      std::vector<double> image(static_cast<size_t>(n));
      double lambda = 0.0;
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          image[static_cast<size_t>(i)] +=
              a[static_cast<size_t>(std::max(i, j) * n + std::min(i, j))] *
              p[static_cast<size_t>(j * shape.rank + k)];
        }
        lambda += image[static_cast<size_t>(i)] * p[static_cast<size_t>(i * shape.rank + k)];
      }
      falls = falls && lambda <= before * (1 + 1e-6);
      before = lambda;
      if (k == 0) largest = lambda;
      for (int64_t i = 0; i < n; ++i)
        worst = std::max(worst, std::fabs(image[static_cast<size_t>(i)] -
                                          lambda * p[static_cast<size_t>(i * shape.rank + k)]) /
                                    largest);
      for (int64_t j = 0; j <= k; ++j) {
        double dot = j == k ? -1.0 : 0.0;
        for (int64_t i = 0; i < n; ++i)
          dot += static_cast<double>(p[static_cast<size_t>(i * shape.rank + k)]) *
                 p[static_cast<size_t>(i * shape.rank + j)];
        skew = std::max(skew, std::fabs(dot));
      }
    }
    check(falls, isa + " eigenvalues fall");
    check(worst < 1e-6 && skew < 1e-6, isa + " eigenvectors of n = " + std::to_string(n) + ": " +
                                           std::to_string(worst * 1e6) + "e-6, " +
                                           std::to_string(skew * 1e6) + "e-6");
    if (first.size() <= which) first.push_back(p);
    check(same(p, first[which++]), isa + " subspace against the baseline");
  }
  std::vector<double> zero(16, 0.0), bad(16, 0.0);
  std::vector<float> p(8);
  bad[8] = NAN;
  check(cpu::leading_vectors(zero.data(), 4, 2, p.data()) && p[0] == 1.0f && p[3] == 1.0f &&
            p[1] == 0.0f,
        isa + " of nothing");
  check(!cpu::leading_vectors(bad.data(), 4, 2, p.data()), isa + " of no number");
}
