// What abi.h has for Muon's orthogonalization: the calls of cuda/matrices/muon.cu. All have the
// bits of the CPU (cpu/matrices/matmul.h, cpu/matrices/row_moment.h). Matrices are bfloat16, in
// device memory, without gaps.
#pragma once

#include <cstdint>

#include "core/exact_sum.h"
#include "core/layout.h"
#include "core/macros.h"

namespace lowbit {

/// Orthogonalizes `count` matrices [rows][cols] in place (core/muon/newton_schulz.h).
struct CudaNewtonSchulz {
  int device;
  void* stream;
  uint16_t* x;
  int64_t count, rows, cols;
  const double* coefficients;  // host: a, b, c of each step
  int steps;
  double factor, eps;  // of norm_divisor
  void* workspace;     // device: as many bytes as `room` says, 256-byte aligned

  int64_t shorter() const { return rows < cols ? rows : cols; }
  int64_t longer() const { return rows < cols ? cols : rows; }
};

/// The parts of a call's workspace.
struct NewtonSchulzRoom {
  int64_t bytes = 0;
  uint16_t *other, *gram, *update;  // as large as x; [count][n][n], n the shorter side
  int64_t* words;                   // [count][ExactSum::kWords]
  uint32_t* absmax;                 // [count]
  float* divisor;                   // [count]

  explicit NewtonSchulzRoom(const CudaNewtonSchulz& call) {
    const int64_t all = call.count * call.rows * call.cols, n = call.shorter();
    other = take<uint16_t>(call, all);
    gram = take<uint16_t>(call, call.count * n * n);
    update = take<uint16_t>(call, call.count * n * n);
    words = take<int64_t>(call, call.count * ExactSum::kWords);
    absmax = take<uint32_t>(call, call.count);
    divisor = take<float>(call, call.count);
  }

 private:
  template <class T>
  T* take(const CudaNewtonSchulz& call, int64_t count) {
    // As integers: only its size is wanted of a call without memory.
    auto* const at = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(call.workspace) +
                                          static_cast<uintptr_t>(bytes));
    bytes += ceil_div(count * static_cast<int64_t>(sizeof(T)), 256) * 256;
    return at;
  }
};

/// Evens out the rows of `count` orthogonalized matrices [rows][cols] in place
/// (core/muon/row_moment.h).
struct CudaRowMoments {
  int device;
  void* stream;
  uint16_t* x;
  float* moments;  // device: [count][rows], updated
  int64_t count, rows, cols;
  double beta2;
  double* squares;  // device: room for [count][rows]
  float* factors;   // device: room for [count][rows]
};

/// sums = a b^T in float32, one chain for each output; a: [rows][depth], b: [cols][depth].
struct CudaProduct {
  int device;
  void* stream;
  const uint16_t *a, *b;
  int64_t rows, cols, depth;
  float* sums;
};

extern "C" {
using CudaNewtonSchulzFn = const char* (*)(const CudaNewtonSchulz*);  // lowbit_cuda_newton_schulz
using CudaRowMomentsFn = const char* (*)(const CudaRowMoments*);      // lowbit_cuda_row_moments
using CudaProductFn = const char* (*)(const CudaProduct*);            // lowbit_cuda_product
}

}  // namespace lowbit
