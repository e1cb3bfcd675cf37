// The inner loops of the low-rank passes (cpu/matrices/lowrank.cpp), one table for each instruction
// set. All give the same bits.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/lowrank/projection.h"
#include "core/lowrank/scaling.h"

namespace lowbit::cpu {

struct LowRankKernels {
  static constexpr int kRows = 64;    // rows of a block of a product
  static constexpr int kDepth = 256;  // terms of a product per pass
  static constexpr int kWidth = 32;   // columns of a panel
  static constexpr int kDotLanes = 16;
  static constexpr int kStrip = 64;  // columns of a gradient per pass, in fixed point

  const char* isa;
  void (*projection)(const ProjectionKey&, uint64_t begin, uint64_t end, float* out);
  /// g *= scale.
  void (*scale)(float* g, int n, float scale);
  void (*widen)(const float* x, double* out, int n);
  /// sum[i][j] += a[i][0] b[0][j] + a[i][1] b[1][j] + ... in this order, for i < rows, j < width
  /// rounded up to 8; a: [kRows][kDepth], b: [depth][kWidth], sum: [kRows][kWidth].
  void (*multiply)(const double* a, const double* b, double* sum, int rows, int depth, int width);
  /// sum[k][j] += round(p[i][k] g[i][j]) for i < rows in any order, k < rank, j < kStrip; p: [rows]
  /// [rank], g: [rows][kStrip], rounder: [kStrip], sum: [rank][kStrip].
  void (*fixed)(const double* p, const double* g, const double* rounder, double* sum, int rows,
                int rank);
  /// x . y: element i goes to lane i mod kDotLanes, and the lanes are added in order.
  double (*dot)(const double* x, const double* y, int64_t n);
  /// y += a * x.
  void (*axpy)(double a, const double* x, double* y, int64_t n);
  /// x, y = c x - s y, s x + c y.
  void (*rotate)(double c, double s, double* x, double* y, int64_t n);
  void (*add_squares)(const float* x, int n, int64_t* words);
  /// sum[j] += x[j]^2 in double.
  void (*squares)(const float* x, int n, double* sum);
  /// core/lowrank/scaling.h over n elements.
  void (*unlimited)(const float* g, const float* s, const Scaling&, float* u, int n);
  void (*limited)(const float* g, const float* s, const Scaling&, float* u, int n);
  void (*residual)(const float* g, const float* back, const float* s, const Scaling&, float* out,
                   int n);
  void (*joined)(const float* back, const float* residual, const Scaling&, float* u, int n);
  void (*applied)(const float* u, const Scaling&, float* p, int n);
};

extern const LowRankKernels kLowRankBaseline;
extern const LowRankKernels kLowRankAvx2;  // each where it is compiled: LOWBIT_AVX2, ...
extern const LowRankKernels kLowRankAvx512;

}  // namespace lowbit::cpu
