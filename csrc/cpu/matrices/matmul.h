// Products of bfloat16 matrices in which every output is one float32 chain
// (core/muon/newton_schulz.h): the same bits for every instruction set and number of threads.
#pragma once

#include <cstdint>

#include "cpu/matrices/matmul_kernels.h"
#include "cpu/matrices/subspace.h"

namespace lowbit::cpu {

/// The kernels of the instruction set in use (cpu/step.h).
const MatmulKernels& matmul_kernels();

/// A matrix [rows][cols] whose rows begin `stride` values apart.
struct Values {
  const uint16_t* at;
  int64_t stride;
};

struct Product {
  int64_t rows, cols, depth;
  Values a;            // a(i, k), [rows][depth]
  Values b;            // b(k, j)
  bool b_transposed;   // b is [cols][depth], else [depth][cols]
  bool a_symmetric;    // a(i, k) = a(k, i), which packs faster
  bool out_symmetric;  // only outputs up to the diagonal are computed, and mirrored
  // out[i][j] = bfloat16(alpha sum + beta self[i][j]), both [rows][cols] without gaps.
  const uint16_t* self;  // null if beta is 0
  float alpha, beta;
  uint16_t* out;
  float* sums;  // if not null, it takes the chains themselves, and `out` nothing
};
/// out must overlap neither a nor b.
void multiply(const Product& product, const Parallel& parallel);

struct NewtonSchulz {
  const double* coefficients;  // a, b, c for each step
  int steps;
  double factor, eps;  // of the divisor: norm_divisor
};
/// Orthogonalizes one matrix, [rows][cols]. out may be x.
void newton_schulz(const NewtonSchulz& how, const uint16_t* x, int64_t rows, int64_t cols,
                   uint16_t* out, const Parallel& parallel);

}  // namespace lowbit::cpu
