// The projection of Fira: the leading singular vectors of a gradient, as P[a][k]
// (core/lowrank/projection.h). The arithmetic is our own, so every processor gives the same bits.
// Every rank needs the whole gradient, but only at a refresh.
//
//   A = G^T G (R >= C) or G G^T (R < C), n x n;  P = its leading eigenvectors
//
// n <= kDirect: cyclic Jacobi in double, about 8 n^3 multiply-adds per sweep and 6 to 10 sweeps.
// The result is as exact as the squared condition number allows (vectors of singular values above
// 1e-7 of the largest).
//
// n > kDirect: kRounds rounds of orthogonal iteration on `width` >= rank vectors, with A and the
// vectors in float32 and sums in double. If width <= kDirect, a Jacobi of A restricted to the span
// of the vectors follows. The cost is about kRounds * n * width * (n + width) multiply-adds. The
// error of vector k shrinks with (sigma_width+1 / sigma_k)^(2 kRounds).
#pragma once

#include <cstdint>
#include <functional>

#include "cpu/matrices/lowrank.h"

namespace lowbit::cpu {

struct Subspace {
  static constexpr int64_t kDirect = 512;
  static constexpr int kRounds = 12;
  /// The number of vectors in the iteration.
  static int64_t width(int64_t n, int64_t rank) {
    const int64_t wanted = rank + rank / 4 + 16;
    return wanted < n ? wanted : n;
  }
};

/// Calls body(begin, end) for parts of [0, count), on the caller's threads. Results do not depend
/// on the parts.
using Body = std::function<void(int64_t begin, int64_t end)>;
using Parallel = std::function<void(int64_t count, const Body& body)>;
inline void one_thread(int64_t count, const Body& body) {
  if (count > 0) body(0, count);
}

/// Computes rows [begin, end) of A, up to the diagonal; a: [n][n]. g is the whole gradient.
void gram(const GradRows& g, bool tall, int64_t begin, int64_t end, double* a);

/// Eigenvectors of a symmetric matrix given up to its diagonal, by descending eigenvalue, equal
/// ones by index. The largest component of each (the first of several) is positive. Destroys a.
/// vectors: [n][n], one per row. Returns false if a value is not finite.
bool eigenvectors(double* a, int64_t n, double* vectors, double* values);

/// P, [n][rank]. Destroys a (from gram). Returns false if a value is not finite: keep the old P
/// then.
bool leading_vectors(double* a, int64_t n, int64_t rank, float* p,
                     const Parallel& parallel = one_thread);

}  // namespace lowbit::cpu
