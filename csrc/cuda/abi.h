// What ops_*.cpp and the CUDA library agree on: plain structs over a C interface, so the library is
// built without torch, opened on first use, and missing where no CUDA compiler was. Every function
// returns null, or a sentence about what went wrong.
#pragma once

#include <cstdint>

#include "core/lowrank/projection.h"
#include "core/lowrank/scaling.h"
#include "core/random.h"
#include "job.h"

namespace lowbit {

constexpr int kCudaAbi = 5;

/// A measured scale of one slot as state keeps it: one tensor, or for rank 1 one for each
/// dimension.
struct CudaScale {
  static constexpr int kMostDims = 6;
  float* most[kMostDims];
  int64_t dims[kMostDims];  // of the parameter, `count` of them
  uint32_t* col_most;       // where the dimensions after the first are combined, else null
  uint32_t *row_next, *col_next;
  int64_t rows, cols;  // entries of row_next and col_next
  int count;
};

/// One phase of a step over `count` jobs of one rule whose pointers are device pointers. Steps,
/// learning rate, scale and found_inf are read on the device, so nothing waits for the device and a
/// CUDA graph may capture the call. Job::coef, Job::random.step and Job::write_param are set on the
/// device.
struct CudaStep {
  int device;
  void* stream;
  const Job* jobs;  // host memory
  int64_t count;
  int phase, phases;    // `phases` of them measure something; the one after them updates
  float* const* steps;  // host array of device pointers, one for each job; incremented in phase 0
                        // unless found_inf
  const double* hyper;  // host, as the rule lists them
  int hypers;
  const float* lr;          // device, or null: hyper[0]
  const float* grad_scale;  // device, or null: 1
  const float* found_inf;   // device, or null: 0
  int maximize;
  const CudaScale* scales;  // host memory, every measured scale of the jobs
  int64_t scale_count;
  void* sums[2];  // device: the sums of rows and of columns of all jobs, set to 0 before a round
  int64_t sums_bytes[2];
  void* workspace;  // device, lowbit_cuda_workspace(jobs, count) bytes, 256-byte aligned
};

/// Float32 values [rows, cols] to codes and scales, or back.
struct CudaCode {
  int device;
  void* stream;
  int format, block;
  int64_t rows, cols;
  float* values;
  void* codes;
  void* scales;
};

/// Device pointers.
struct CudaAccumulation {
  int device;
  void* stream;
  Accumulation job;
};

/// Memory that is not the device's own, at one address for it and the host: pinned stays on the
/// host, managed moves between the two by pages.
enum CudaMemory : int { kPinned, kManaged };
struct CudaBlock {
  int device;
  int memory;  // a CudaMemory
  int64_t bytes;
  void* at;  // what lowbit_cuda_allocate found
};

/// A matrix of a low-rank step (docs/lowrank.md), or what is here of its rows; device pointers.
struct LowRankJob {
  const void* grad;
  void *param, *extra;  // extra: what the format keeps beside the parameter, or null
  const float* step;    // steps so far; the inner step counts it
  const float* lr;      // or null: hyper[0]
  float* p;             // the rows of P that go with these of the gradient
  float *low, *n;       // L and N
  float* scales;        // of channels, or one
  float* residual;      // Fira
  float* norm;          // what the limiter keeps
  uint32_t* most;       // of columns, 0 at first
  int64_t* sums;        // [rank][cols], 0 at first
  int64_t* words;       // exact sums, 0 at first: the squares of N, of L and of the update
  int64_t rows, cols, rank;
  int64_t first;    // global flat index of the element (0, 0)
  int64_t p_first;  // number of the first row of P that is here
  int64_t gap;      // steps between two projections
  uint64_t seed;
  uint32_t stream;
  int grad_format, param_format;
  int exponent;    // |P| <= 2^exponent
  bool tall;       // of the whole matrix
  bool fira;       // else APOLLO
  bool draws;      // P is drawn here, else given
  bool by_tensor;  // one scale for all
  bool limits;     // the norm of the update
  bool maximize;
  double hyper[7];  // lr, beta1, beta2, weight_decay, front, after, alpha
  double gamma;
  // Set on the device, in the first pass.
  bool write;  // false where lr is 0
  float g_scale;
  Scaling scaling;
  RandomKey random;
  ProjectionKey projection;

  LB_HD int64_t p_rows() const { return tall ? cols : rows; }
  LB_HD int64_t low_size() const { return rank * (tall ? rows : cols); }
  LB_HD int64_t channels() const { return by_tensor ? 1 : tall ? rows : cols; }
};

/// What happens between two reductions over ranks (lowbit/lowrank.py).
enum class LowRankPass { kProject, kSumColumns, kValues, kMeasure, kNorm, kApply };
constexpr int kLowRankPasses = 6;

/// One pass over `count` matrices. Everything that changes from step to step is read on the device.
struct CudaLowRank {
  int device;
  void* stream;
  const LowRankJob* jobs;  // host memory
  int64_t count;
  LowRankPass pass;
  LowRankJob* table;        // device: room for the jobs, kept from the first pass to the last
  const float* grad_scale;  // device, or null: 1
  const float* found_inf;   // device, or null: 0
};

extern "C" {
using CudaAbiFn = int (*)();                                          // lowbit_cuda_abi
using CudaWorkspaceFn = int64_t (*)(const Job* jobs, int64_t count);  // lowbit_cuda_workspace
using CudaStepFn = const char* (*)(const CudaStep*);                  // lowbit_cuda_step
using CudaCodeFn = const char* (*)(const CudaCode*);  // lowbit_cuda_encode, lowbit_cuda_decode
using CudaAccumulateFn = const char* (*)(const CudaAccumulation*);  // lowbit_cuda_accumulate
using CudaAllocateFn = const char* (*)(CudaBlock*);                 // lowbit_cuda_allocate
/// Waits for the device first: lowbit_cuda_free.
using CudaFreeFn = const char* (*)(const CudaBlock*);
/// Moves managed blocks to the device where it has room for them: lowbit_cuda_prefetch.
using CudaPrefetchFn = const char* (*)(int device, void* stream);
using CudaLowRankFn = const char* (*)(const CudaLowRank*);  // lowbit_cuda_lowrank
}

}  // namespace lowbit
