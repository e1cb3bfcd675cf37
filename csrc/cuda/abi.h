// The interface between csrc/ops and the CUDA library: plain structs over a C interface. The
// library is built without torch, is opened on first use, and is absent if the build had no CUDA
// compiler. Every function returns null or one sentence that explains the error.
#pragma once

#include <cstdint>

#include "core/job.h"
#include "core/lowrank/projection.h"
#include "core/lowrank/scaling.h"
#include "core/random.h"

namespace lowbit {

constexpr int kCudaAbi = 8;

/// The stored form of a slot's cross-tile scales: one tensor, or for rank 1 one tensor per
/// dimension.
struct CudaScale {
  static constexpr int kMaxDims = 6;
  float* absmax[kMaxDims];
  int64_t dims[kMaxDims];  // of the parameter; `count` entries
  uint32_t* col_absmax;    // if the dimensions after the first are combined, else null
  uint32_t *row_next, *col_next;
  int64_t rows, cols;  // lengths of row_next and col_next
  int count;
};

/// The order of the jobs of a phase in its table on the device, made by lowbit_cuda_plan. It serves
/// every step over the same jobs, whose gradients alone may be elsewhere.
struct CudaPlan;

/// One phase of a step over `count` jobs of one rule with device pointers. Step counts, learning
/// rate, scale and found_inf are read on the device, so nothing waits for the device and a CUDA
/// graph can capture the call. The device sets Job::coef, Job::random.step and Job::write_param.
struct CudaStep {
  int device;
  void* stream;
  const Job* jobs;  // host memory
  int64_t count;
  int phase, phases;  // the first `phases` phases measure, the next one updates
  // Host array of device pointers, one per job. Phase 0 increments them unless found_inf is set.
  float* const* steps;
  const void* const* grads;  // host array of device pointers, one per job, as in `jobs`
  const double* hyper;       // host, in the order of the rule
  int hypers;
  const float* lr;          // device, or null: hyper[0]
  const float* grad_scale;  // device, or null: 1
  const float* found_inf;   // device, or null: 0
  int maximize;
  const CudaScale* scales;  // host memory: every cross-tile scale of the jobs
  int64_t scale_count;
  void* sums[2];  // device: the sums of rows and of columns of all jobs, zeroed before a round
  int64_t sums_bytes[2];
  CudaPlan* plan;
  void* workspace;  // device: the table, as many bytes as the plan needs, 256-byte aligned
  // Whether the table is not yet there. With a table, `jobs` are as they were and are not
  // read, and `grads` may be elsewhere, as aligned as they were.
  bool writes;
};

/// Quantizes or dequantizes float32 values [rows, cols].
struct CudaCode {
  int device;
  void* stream;
  int format, block;
  int64_t rows, cols;
  float* values;
  void* codes;
  void* scales;
};

/// Accumulations, whose pointers are device pointers. No two have a buffer in common.
struct CudaAccumulation {
  int device;
  void* stream;
  const Accumulation* jobs;  // host memory
  int64_t count;
};

/// Sums of gradients, whose pointers are device pointers. No two have words or means in common.
struct CudaMeans {
  int device;
  void* stream;
  const MeanSum* jobs;  // host memory
  int64_t count;
};

/// Memory outside the device's own, at one address for host and device. Pinned memory stays on the
/// host; managed memory moves between the two by pages.
enum CudaMemory : int { kPinned, kManaged };
struct CudaBlock {
  int device;
  int memory;  // a CudaMemory
  int64_t bytes;
  void* at;  // the result of lowbit_cuda_allocate
};

/// A matrix of a low-rank step (docs/definitions/lowrank.md), or its local rows. All pointers are
/// device pointers.
struct LowRankJob {
  const void* grad;
  // compensation: the format's compensation or correction bits, or null.
  void *param, *compensation;
  const float* step;  // number of steps so far; the inner step increments it
  const float* lr;    // or null: use hyper[0]
  float* p;           // the rows of P for these rows of the gradient
  float *low, *n;     // L and N
  float* scales;      // one per channel, or a single one
  float* residual;    // for Fira
  float* norm;        // state of the limiter
  uint32_t* absmax;   // of columns, initially 0
  int64_t* sums;      // [rank][cols], initially 0
  int64_t* words;     // exact sums, initially 0: the squares of N, of L and of the update
  int64_t rows, cols, rank;
  int64_t first;    // global flat index of the element (0, 0)
  int64_t p_first;  // index of the first local row of P
  int64_t gap;      // number of steps between two projections
  uint64_t seed;
  uint32_t stream;
  int grad_format, param_format;
  int exponent;    // |P| <= 2^exponent
  bool tall;       // of the whole matrix
  bool fira;       // false: APOLLO
  bool draws;      // whether P is generated here or given
  bool by_tensor;  // one scale for the whole tensor
  bool limits;     // whether the norm of the update is limited
  bool maximize;
  double hyper[7];  // lr, beta1, beta2, weight_decay, front, after, alpha
  double gamma;
  // Set on the device, in the first pass.
  bool write;  // false if lr is 0
  float g_scale;
  Scaling scaling;
  RandomKey random;
  ProjectionKey projection;

  LB_HD int64_t p_rows() const { return tall ? cols : rows; }
  LB_HD int64_t low_size() const { return rank * (tall ? rows : cols); }
  LB_HD int64_t channels() const { return by_tensor ? 1 : tall ? rows : cols; }
};

/// The passes between two reductions over ranks (lowbit/step/lowrank.py).
enum class LowRankPass { kProject, kSumColumns, kValues, kMeasure, kNorm, kApply };
constexpr int kLowRankPasses = 6;

/// One pass over `count` matrices. Everything that changes from step to step is read on the device.
struct CudaLowRank {
  int device;
  void* stream;
  const LowRankJob* jobs;  // host memory
  int64_t count;
  LowRankPass pass;
  LowRankJob* table;        // device: room for the jobs, valid from the first pass to the last
  const float* grad_scale;  // device, or null: 1
  const float* found_inf;   // device, or null: 0
};

extern "C" {
using CudaAbiFn = int (*)();  // lowbit_cuda_abi
/// Makes the plan of a call without one, and says how large its table is: lowbit_cuda_plan.
using CudaPlanFn = const char* (*)(const CudaStep*, CudaPlan**, int64_t* bytes);
using CudaDiscardFn = void (*)(CudaPlan*);  // lowbit_cuda_discard
/// If the stream is being captured, the graph keeps `owned` and calls `release` with it when it
/// ends, from any thread, where nothing may be asked of CUDA. `captures` says whether:
/// lowbit_cuda_retain.
using CudaRetainFn = const char* (*)(int device, void* stream, void* owned, void (*release)(void*),
                                     bool* captures);
using CudaStepFn = const char* (*)(const CudaStep*);  // lowbit_cuda_step
// lowbit_cuda_quantize, lowbit_cuda_dequantize
using CudaCodeFn = const char* (*)(const CudaCode*);
using CudaAccumulateFn = const char* (*)(const CudaAccumulation*);  // lowbit_cuda_accumulate
using CudaMeansFn = const char* (*)(const CudaMeans*);              // lowbit_cuda_means
using CudaAllocateFn = const char* (*)(CudaBlock*);                 // lowbit_cuda_allocate
/// Waits for the device first: lowbit_cuda_free.
using CudaFreeFn = const char* (*)(const CudaBlock*);
/// Moves managed blocks to the device while it has room: lowbit_cuda_prefetch.
using CudaPrefetchFn = const char* (*)(int device, void* stream);
using CudaLowRankFn = const char* (*)(const CudaLowRank*);  // lowbit_cuda_lowrank
}

}  // namespace lowbit
