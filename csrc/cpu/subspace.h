// The projection of Fira: the leading singular vectors of a gradient, as P[a][k] (core/lowrank/
// projection.h), by our own arithmetic: the same bits on every processor. All ranks need the whole
// gradient, at a refresh only.
//
//   A = G^T G (R >= C) or G G^T (R < C), n x n;  P = its leading eigenvectors
//
// n <= kDirect: cyclic Jacobi in double, about 8 n^3 multiply-adds a sweep and 6 to 10 sweeps;
// exact to what the squared condition allows (vectors of singular values above 1e-7 of the
// largest). n > kDirect: kRounds rounds of orthogonal iteration on `width` >= rank vectors, A and
// the vectors in float32, sums in double, and where width <= kDirect a Jacobi of the A that the
// vectors span. About kRounds * n * width * (n + width) multiply-adds. A vector k is as exact as
// (sigma_width+1 / sigma_k)^(2 kRounds) is small.
#pragma once

#include <cstdint>
#include <functional>

#include "cpu/lowrank.h"

namespace lowbit::cpu {

struct Subspace {
  static constexpr int64_t kDirect = 512;
  static constexpr int kRounds = 12;
  /// How many vectors the iteration carries.
  static int64_t width(int64_t n, int64_t rank) {
    const int64_t wanted = rank + rank / 4 + 16;
    return wanted < n ? wanted : n;
  }
};

/// Calls body(begin, end) for parts of [0, count), from threads of the caller's. What is computed
/// does not depend on the parts.
using Body = std::function<void(int64_t begin, int64_t end)>;
using Parallel = std::function<void(int64_t count, const Body& body)>;
inline void one_thread(int64_t count, const Body& body) {
  if (count > 0) body(0, count);
}

/// Rows [begin, end) of A, up to the diagonal; a: [n][n]. g: the whole gradient.
void gram(const GradRows& g, bool tall, int64_t begin, int64_t end, double* a);

/// Eigenvectors of a symmetric matrix of which the part up to the diagonal is given, by falling
/// eigenvalue, those of equal ones by place; each has its largest component (the first of these)
/// positive. a is destroyed; vectors: [n][n], one in each row. False where a value is not finite.
bool eigenvectors(double* a, int64_t n, double* vectors, double* values);

/// P, [n][rank]. a (from gram) is destroyed. False where a value is not finite: keep the old P.
bool leading_vectors(double* a, int64_t n, int64_t rank, float* p,
                     const Parallel& parallel = one_thread);

}  // namespace lowbit::cpu
