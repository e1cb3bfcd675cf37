// Included once by each lowrank_ISA.cpp, which defines LOWBIT_LOWRANK, the name of the table, and
// LOWBIT_ISA.
#include "core/bits.h"
#include "core/exact_sum.h"
#include "cpu/matrices/lowrank_kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace lowbit::cpu {
namespace {

using K = LowRankKernels;

// The product of two converted floats is exact, so a fused multiply-add gives the same result as a
// product and a sum.
#if defined(__AVX512F__)
constexpr int kLanes = 8, kVectors = 4;
using Doubles = __m512d;
LB_HD Doubles load(const double* x) { return _mm512_loadu_pd(x); }
LB_HD Doubles same(double x) { return _mm512_set1_pd(x); }
LB_HD void store(double* to, Doubles x) { _mm512_storeu_pd(to, x); }
LB_HD Doubles exact_product_sum(Doubles a, Doubles b, Doubles c) {
  return _mm512_fmadd_pd(a, b, c);
}
#elif defined(__AVX2__)
constexpr int kLanes = 4, kVectors = 2;
using Doubles = __m256d;
LB_HD Doubles load(const double* x) { return _mm256_loadu_pd(x); }
LB_HD Doubles same(double x) { return _mm256_set1_pd(x); }
LB_HD void store(double* to, Doubles x) { _mm256_storeu_pd(to, x); }
LB_HD Doubles exact_product_sum(Doubles a, Doubles b, Doubles c) {
  return _mm256_fmadd_pd(a, b, c);
}
#else
constexpr int kLanes = 2, kVectors = 2;
using Doubles = double __attribute__((vector_size(16)));
LB_HD Doubles load(const double* x) {
  Doubles y;
  __builtin_memcpy(&y, x, sizeof y);
  return y;
}
LB_HD Doubles same(double x) { return Doubles{x, x}; }
LB_HD void store(double* to, Doubles x) { __builtin_memcpy(to, &x, sizeof x); }
LB_HD Doubles exact_product_sum(Doubles a, Doubles b, Doubles c) { return a * b + c; }
#endif

/// Keeps kTall rows times kWide vectors of columns in registers.
template <int kTall, int kWide>
LB_HD void multiply_tile(const double* a, const double* b, double* sum, int depth) {
  Doubles acc[kTall][kWide];
  for (int i = 0; i < kTall; ++i) {
    for (int j = 0; j < kWide; ++j) acc[i][j] = load(sum + i * K::kWidth + j * kLanes);
  }
  for (int c = 0; c < depth; ++c) {
    Doubles row[kWide];
    for (int j = 0; j < kWide; ++j) row[j] = load(b + c * K::kWidth + j * kLanes);
    for (int i = 0; i < kTall; ++i) {
      const Doubles x = same(a[i * K::kDepth + c]);
      for (int j = 0; j < kWide; ++j) acc[i][j] = exact_product_sum(x, row[j], acc[i][j]);
    }
  }
  for (int i = 0; i < kTall; ++i) {
    for (int j = 0; j < kWide; ++j) store(sum + i * K::kWidth + j * kLanes, acc[i][j]);
  }
}

template <int kWide>
void multiply_strip(const double* a, const double* b, double* sum, int rows, int depth) {
  int i = 0;
  for (; i + 4 <= rows; i += 4) {
    multiply_tile<4, kWide>(a + i * K::kDepth, b, sum + i * K::kWidth, depth);
  }
  for (; i < rows; ++i) {
    multiply_tile<1, kWide>(a + i * K::kDepth, b, sum + i * K::kWidth, depth);
  }
}

void multiply(const double* a, const double* b, double* sum, int rows, int depth, int width) {
  const int vectors = (width + kLanes - 1) / kLanes;
  int j = 0;
  for (; j + kVectors <= vectors; j += kVectors) {
    multiply_strip<kVectors>(a, b + j * kLanes, sum + j * kLanes, rows, depth);
  }
  for (; j < vectors; ++j) {
    multiply_strip<1>(a, b + j * kLanes, sum + j * kLanes, rows, depth);
  }
}

template <int kTall>
LB_HD void fixed_tile(const double* p, const double* g, const double* rounder, double* sum,
                      int rows, int rank) {
  constexpr int kWide = 2;
  for (int at = 0; at < K::kStrip; at += kWide * kLanes) {
    Doubles acc[kTall][kWide], round[kWide];
    for (int j = 0; j < kWide; ++j) round[j] = load(rounder + at + j * kLanes);
    for (int k = 0; k < kTall; ++k) {
      for (int j = 0; j < kWide; ++j) acc[k][j] = load(sum + k * K::kStrip + at + j * kLanes);
    }
    for (int i = 0; i < rows; ++i) {
      Doubles row[kWide];
      for (int j = 0; j < kWide; ++j) row[j] = load(g + i * K::kStrip + at + j * kLanes);
      for (int k = 0; k < kTall; ++k) {
        const Doubles x = same(p[static_cast<int64_t>(i) * rank + k]);
        for (int j = 0; j < kWide; ++j)
          acc[k][j] = acc[k][j] + (exact_product_sum(x, row[j], round[j]) - round[j]);
      }
    }
    for (int k = 0; k < kTall; ++k) {
      for (int j = 0; j < kWide; ++j) store(sum + k * K::kStrip + at + j * kLanes, acc[k][j]);
    }
  }
}

void fixed(const double* p, const double* g, const double* rounder, double* sum, int rows,
           int rank) {
  int k = 0;
  for (; k + 4 <= rank; k += 4) fixed_tile<4>(p + k, g, rounder, sum + k * K::kStrip, rows, rank);
  for (; k < rank; ++k) fixed_tile<1>(p + k, g, rounder, sum + k * K::kStrip, rows, rank);
}

void projection(const ProjectionKey& key, uint64_t begin, uint64_t end, float* out) {
  projection_entries(key, begin, end, out);
}
void scale(float* g, int n, float factor) {
  for (int i = 0; i < n; ++i) g[i] = g[i] * factor;
}
void widen(const float* x, double* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = static_cast<double>(x[i]);
}
// The values need not be converted floats, so products are never fused.
double dot(const double* x, const double* y, int64_t n) {
  constexpr int kParts = K::kDotLanes / kLanes;
  Doubles acc[kParts] = {};
  int64_t i = 0;
  for (; i + K::kDotLanes <= n; i += K::kDotLanes) {
    for (int j = 0; j < kParts; ++j) {
      acc[j] = acc[j] + load(x + i + j * kLanes) * load(y + i + j * kLanes);
    }
  }
  double lane[K::kDotLanes], sum = 0.0;
  for (int j = 0; j < kParts; ++j) store(lane + j * kLanes, acc[j]);
  for (int j = 0; i < n; ++i, ++j) lane[j] += x[i] * y[i];
  for (int j = 0; j < K::kDotLanes; ++j) sum += lane[j];
  return sum;
}
void axpy(double a, const double* x, double* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = y[i] + a * x[i];
}
void rotate(double c, double s, double* x, double* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const double a = x[i], b = y[i];
    x[i] = c * a - s * b;
    y[i] = s * a + c * b;
  }
}
void add_squares(const float* x, int n, int64_t* words) { exact_add_squares(x, n, words); }
void squares(const float* x, int n, double* sum) {
  for (int i = 0; i < n; ++i) sum[i] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
}
void unlimited(const float* g, const float* s, const Scaling& c, float* u, int n) {
  for (int i = 0; i < n; ++i) u[i] = c.unlimited(g[i], s[i]);
}
void limited(const float* g, const float* s, const Scaling& c, float* u, int n) {
  for (int i = 0; i < n; ++i) u[i] = c.limited(g[i], s[i]);
}
void residual(const float* g, const float* back, const float* s, const Scaling& c, float* out,
              int n) {
  for (int i = 0; i < n; ++i) out[i] = c.residual(g[i], back[i], s[i]);
}
void joined(const float* back, const float* rest, const Scaling& c, float* u, int n) {
  for (int i = 0; i < n; ++i) u[i] = c.joined(back[i], rest[i]);
}
void applied(const float* u, const Scaling& c, float* p, int n) {
  for (int i = 0; i < n; ++i) p[i] = c.applied(p[i], u[i]);
}

}  // namespace

const LowRankKernels LOWBIT_LOWRANK = {
    LOWBIT_ISA, projection,  scale,   widen,     multiply, fixed,    dot,    axpy,
    rotate,     add_squares, squares, unlimited, limited,  residual, joined, applied};

}  // namespace lowbit::cpu
