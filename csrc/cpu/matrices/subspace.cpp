#include "cpu/matrices/subspace.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "cpu/matrices/product.h"

namespace lowbit::cpu {
namespace {

using K = LowRankKernels;

size_t index(int64_t i) { return static_cast<size_t>(i); }

/// Elements [first, first + count) of the shorter dimension at positions [at, at + deep) of the
/// longer one: out[i * row + c * col].
void slice(const GradRows& g, bool tall, int64_t first, int count, int64_t at, int deep,
           double* out, int row, int col) {
  float line[kTile];
  if (tall) {
    for (int c = 0; c < deep; ++c) {
      load(g, at + c, first, count, line);
      for (int i = 0; i < count; ++i) out[i * row + c * col] = static_cast<double>(line[i]);
    }
  } else {
    for (int i = 0; i < count; ++i) {
      load(g, first + i, at, deep, line);
      for (int c = 0; c < deep; ++c) out[i * row + c * col] = static_cast<double>(line[c]);
    }
  }
}

/// Flips the sign of the vector if its largest component is negative.
void orient(double* x, int64_t n) {
  int64_t largest = 0;
  for (int64_t i = 1; i < n; ++i) {
    if (__builtin_fabs(x[i]) > __builtin_fabs(x[largest])) largest = i;
  }
  if (x[largest] < 0.0) {
    for (int64_t i = 0; i < n; ++i) x[i] = -x[i];
  }
}

/// Modified Gram-Schmidt: each vector in turn is normalized and removed from those after it; x:
/// [count][n]. A vector in the span of those before it becomes 0.
void orthonormalize(double* x, int64_t count, int64_t n, const Parallel& parallel) {
  const K& kernel = lowrank_kernels();
  std::vector<double> before(index(count));
  for (int64_t k = 0; k < count; ++k) before[index(k)] = kernel.dot(x + k * n, x + k * n, n);
  for (int64_t k = 0; k < count; ++k) {
    double* const v = x + k * n;
    const double square = kernel.dot(v, v, n);
    const bool spanned = square <= before[index(k)] * 0x1p-80;
    const double inverse = spanned ? 0.0 : 1.0 / __builtin_sqrt(square);
    for (int64_t i = 0; i < n; ++i) v[i] = v[i] * inverse;
    parallel(count - k - 1, [&](int64_t begin, int64_t end) {
      for (int64_t j = k + 1 + begin; j < k + 1 + end; ++j) {
        kernel.axpy(-kernel.dot(v, x + j * n, n), v, x + j * n, n);
      }
    });
  }
}

/// Scales the matrix by a power of two so that the largest diagonal entry is near 1 and float32 can
/// represent the others. Returns false if an entry is not finite. A zero matrix stays zero.
bool normalize(double* a, int64_t n) {
  double max_diagonal = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      if (!(a[i * n + j] - a[i * n + j] == 0.0)) return false;
    }
    if (a[i * n + i] > max_diagonal) max_diagonal = a[i * n + i];
  }
  if (max_diagonal == 0.0) return true;
  int exponent = exponent_above(max_diagonal);
  exponent = exponent < -1000 ? -1000 : exponent > 1000 ? 1000 : exponent;
  const double factor = power_of_two(-exponent);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) a[i * n + j] = a[i * n + j] * factor;
  }
  return true;
}

void mirror(double* a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < i; ++j) a[j * n + i] = a[i * n + j];
  }
}

/// Orthogonal iteration; x: [width][n], rows, out.
void iterate(const double* a, int64_t n, int64_t width, std::vector<double>& x,
             const Parallel& parallel) {
  std::vector<float> matrix(index(n * n)), from(index(n * width)), to(index(n * width));
  for (int64_t e = 0; e < n * n; ++e) matrix[index(e)] = static_cast<float>(a[e]);
  const auto row = [&](int64_t i, int64_t c, int count, float* out) {
    std::memcpy(out, &matrix[index(i * n + c)], static_cast<size_t>(count) * sizeof(float));
  };
  make_projection(projection_key(0, 0, 0, width), 0, n, to.data());
  for (int round = 0;; ++round) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t k = 0; k < width; ++k) {
        x[index(k * n + i)] = static_cast<double>(to[index(i * width + k)]);
      }
    }
    orthonormalize(x.data(), width, n, parallel);
    if (round == Subspace::kRounds) break;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t k = 0; k < width; ++k) {
        from[index(i * width + k)] = static_cast<float>(x[index(k * n + i)]);
      }
    }
    parallel(n, [&](int64_t begin, int64_t end) {
      product(row, from.data(), width, 1, n, width, begin, end, to.data());
    });
  }
  orthonormalize(x.data(), width, n, parallel);  // restores the accuracy that the first pass lost
}

/// Replaces the rows of x by the eigenvectors of the matrix within their span.
void rayleigh_ritz(const double* a, int64_t n, int64_t width, std::vector<double>& x,
                   const Parallel& parallel) {
  const K& kernel = lowrank_kernels();
  std::vector<double> image(index(width * n)), small(index(width * width)),
      vectors(index(width * width)), values(index(width));
  parallel(n, [&](int64_t begin, int64_t end) {
    constexpr int64_t kTogether = 16;  // rows of a that stay in the cache while x passes
    for (int64_t first = begin; first < end; first += kTogether) {
      const int64_t last = std::min(first + kTogether, end);
      for (int64_t k = 0; k < width; ++k) {
        for (int64_t i = first; i < last; ++i) {
          image[index(k * n + i)] = kernel.dot(a + i * n, &x[index(k * n)], n);
        }
      }
    }
  });
  parallel(width, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      for (int64_t j = 0; j <= k; ++j) {
        small[index(k * width + j)] = kernel.dot(&x[index(j * n)], &image[index(k * n)], n);
      }
    }
  });
  eigenvectors(small.data(), width, vectors.data(), values.data());
  parallel(width, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      std::fill_n(&image[index(k * n)], n, 0.0);
      for (int64_t j = 0; j < width; ++j) {
        kernel.axpy(vectors[index(k * width + j)], &x[index(j * n)], &image[index(k * n)], n);
      }
    }
  });
  x.swap(image);
}

}  // namespace

void gram(const GradRows& g, bool tall, int64_t begin, int64_t end, double* a) {
  const K& kernel = lowrank_kernels();
  const int64_t n = tall ? g.cols : g.rows, depth = tall ? g.rows : g.cols;
  const int64_t panels = ceil_div(end, K::kWidth);
  std::vector<double> left(K::kRows * K::kDepth), right(K::kDepth * K::kWidth),
      sums(index(panels * K::kRows * K::kWidth));
  for (int64_t row = begin; row < end; row += K::kRows) {
    const int rows = length(row, end, K::kRows);
    const int64_t used = ceil_div(row + rows, K::kWidth);
    std::fill(sums.begin(), sums.end(), 0.0);
    for (int64_t at = 0; at < depth; at += K::kDepth) {
      const int deep = length(at, depth, K::kDepth);
      slice(g, tall, row, rows, at, deep, left.data(), K::kDepth, 1);
      for (int64_t q = 0; q < used; ++q) {
        const int wide = length(q * K::kWidth, n, K::kWidth);
        std::fill(right.begin(), right.end(), 0.0);
        slice(g, tall, q * K::kWidth, wide, at, deep, right.data(), 1, K::kWidth);
        kernel.multiply(left.data(), right.data(), &sums[index(q * K::kRows * K::kWidth)], rows,
                        deep, wide);
      }
    }
    for (int i = 0; i < rows; ++i) {
      for (int64_t j = 0; j <= row + i; ++j) {
        const int64_t q = j / K::kWidth;
        a[(row + i) * n + j] = sums[index((q * K::kRows + i) * K::kWidth + j - q * K::kWidth)];
      }
    }
  }
}

bool eigenvectors(double* a, int64_t n, double* vectors, double* values) {
  const K& kernel = lowrank_kernels();
  if (!normalize(a, n)) return false;
  // Rows are an odd number of cache lines apart, because columns are written too.
  const int64_t stride = n + 8 + (n / 8 % 2 ? 8 : 0);
  std::vector<double> basis(index(n * n), 0.0), full(index(n * stride));
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j)
      full[index(i * stride + j)] = full[index(j * stride + i)] = a[i * n + j];
  }
  for (int64_t i = 0; i < n; ++i) basis[index(i * n + i)] = 1.0;
  bool turned = true;
  for (int sweep = 0; turned && sweep < 40; ++sweep) {
    turned = false;
    for (int64_t p = 0; p + 1 < n; ++p) {
      for (int64_t q = p + 1; q < n; ++q) {
        double* const row_p = &full[index(p * stride)];
        double* const row_q = &full[index(q * stride)];
        const double pp = row_p[p], qq = row_q[q], pq = row_p[q];
        const double geometric =
            __builtin_sqrt(__builtin_fabs(pp)) * __builtin_sqrt(__builtin_fabs(qq));
        if (__builtin_fabs(pq) <= 0x1p-52 * geometric || __builtin_fabs(pq) < 0x1p-60) continue;
        turned = true;
        // tan of the angle: the smaller root of t^2 + 2 theta t - 1.
        const double theta = (qq - pp) / (2.0 * pq);
        const double root = __builtin_sqrt(theta * theta + 1.0);
        const double t = theta >= 0.0 ? 1.0 / (theta + root) : -1.0 / (root - theta);
        const double c = 1.0 / __builtin_sqrt(t * t + 1.0), s = t * c;
        kernel.rotate(c, s, row_p, row_q, n);
        kernel.rotate(c, s, &basis[index(p * n)], &basis[index(q * n)], n);
        for (int64_t i = 0; i < n; ++i) {
          full[index(i * stride + p)] = row_p[i];
          full[index(i * stride + q)] = row_q[i];
        }
        row_p[p] = pp - t * pq;
        row_q[q] = qq + t * pq;
        row_p[q] = row_q[p] = 0.0;
      }
    }
  }
  const auto diagonal = [&](int64_t i) { return full[index(i * stride + i)]; };
  std::vector<int64_t> order(index(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t i, int64_t j) { return diagonal(i) > diagonal(j); });
  for (int64_t k = 0; k < n; ++k) {
    const int64_t from = order[index(k)];
    values[k] = diagonal(from);
    std::memcpy(vectors + k * n, &basis[index(from * n)], static_cast<size_t>(n) * sizeof(double));
    orient(vectors + k * n, n);
  }
  return true;
}

bool leading_vectors(double* a, int64_t n, int64_t rank, float* p, const Parallel& parallel) {
  std::vector<double> x, values(index(n));
  if (n <= Subspace::kDirect) {
    x.resize(index(n * n));
    if (!eigenvectors(a, n, x.data(), values.data())) return false;
  } else {
    if (!normalize(a, n)) return false;
    mirror(a, n);
    const int64_t width = Subspace::width(n, rank);
    x.resize(index(width * n));
    iterate(a, n, width, x, parallel);
    if (width <= Subspace::kDirect) rayleigh_ritz(a, n, width, x, parallel);
    for (int64_t k = 0; k < rank; ++k) orient(&x[index(k * n)], n);
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t k = 0; k < rank; ++k) {
      p[i * rank + k] = static_cast<float>(x[index(k * n + i)]);
    }
  }
  return true;
}

}  // namespace lowbit::cpu
