// The table of jobs on the device, and what is computed for each tensor in every step.
//
// Between two steps over the same tensors the table stays where it is. `prepare` then gets what may
// change as its arguments: gradients, hyperparameters, and the addresses of the numbers that it
// reads on the device. All of it travels with the launch, so a captured graph has its own copy, and
// steps outside of the graph do not disturb it.
#pragma once

#include "core/finalize.h"
#include "cuda/step/fast_job.cuh"

namespace lowbit::cuda {

/// What a table keeps of a job for `prepare`.
struct KeptJob {
  float* step;
  bool counts;  // whether this entry increments the step
  bool fast;    // whether a fixed kernel updates it
};

/// The tables in the workspace, with one entry per job.
struct Table {
  unsigned char* fast;  // a FastJob of kFastBytes
  Job* jobs;
  int64_t* ends;         // running tiles of what measures
  int64_t* matrix_ends;  // running matrices (Job::batches) of all jobs
  FactorMove* moves;     // of the factored moment whose sums are being finalized
  KeptJob* kept;
  uint32_t* first_unit;  // within the kernel's units
  uint32_t* job_of;      // one entry per unit: its job, counted within the kernel's
};

/// The part of the job table that one launch of `prepare` serves. It is passed by value. Kernel
/// arguments are limited to 32764 bytes and most of a job equals the previous one, so where the
/// table is written each job contributes only the words that differ from the first job. Where the
/// table is there, it contributes the address of its gradient.
struct Prepare {
  static constexpr int kWarps = 4, kJobs = 224, kWords = 2100, kGrads = 4000;
  static constexpr int kJobWords =
      static_cast<int>(__builtin_offsetof(Job, coef) / sizeof(uint64_t));
  struct Item {
    int64_t end, matrix_end;
    float* step;
    uint64_t differs[2];         // one bit for each word of the job
    int at;                      // index of its first word
    uint32_t units, first_unit;  // within the kernel's units
    uint32_t entry;              // index of the first unit in Table::job_of
    uint32_t number;             // among the kernel's jobs
    bool counts, fast;
  };
  struct Written {
    uint64_t first[kJobWords];
    Item item[kJobs];
    uint64_t words[kWords];
  };
  static_assert(kJobWords <= 128 && __builtin_offsetof(Job, coef) % sizeof(uint64_t) == 0);
  Table table;
  const float *lr, *grad_scale, *found_inf;  // or null
  double hyper[kRuleHypers];
  int count, maximize, phase, phases;
  bool writes;  // else the table is there
  union {
    Written written;
    const void* grad[kGrads];
  };
};
static_assert(sizeof(Prepare) <= 32764);

struct PrepareShared {
  int64_t digit[Prepare::kWarps][ExactSum::kWords];
};

/// Writes the entries of a job. The lanes copy in parallel.
__device__ __forceinline__ void write_job(const Prepare& call, int i, int lane) {
  const Prepare::Written& from = call.written;
  const Prepare::Item& item = from.item[i];
  auto* words = reinterpret_cast<Word*>(call.table.jobs + i);
  for (int w = lane; w < Prepare::kJobWords; w += kLanes) {
    const uint64_t up_to = item.differs[w / 64] << (63 - w % 64);  // its own bit is the first
    const int before = (w < 64 ? 0 : __popcll(item.differs[0])) + __popcll(up_to << 1);
    words[w] = up_to >> 63 ? from.words[item.at + before] : from.first[w];
  }
  for (uint32_t u = static_cast<uint32_t>(lane); u < item.units; u += kLanes)
    call.table.job_of[item.entry + u] = item.number;
  if (lane != 0) return;
  call.table.ends[i] = item.end;
  call.table.matrix_ends[i] = item.matrix_end;
  call.table.kept[i] = {item.step, item.counts, item.fast};
  call.table.first_unit[i] = item.first_unit;
}

/// Writes what a fixed kernel needs of a job. A function of its own, with registers of its own.
LB_NOINLINE void set_fast(const Table& table, int i) {
  const Job& job = table.jobs[i];
  visit(job.rule, UpdateRules{}, [&](auto rule) {
    using U = decltype(rule);
    if constexpr (HasFast<U>) {
      static_assert(sizeof(FastJob<U>) <= kFastBytes);
      reinterpret_cast<FastJob<U>*>(table.fast + static_cast<size_t>(i) * kFastBytes)
          ->set(job, *reinterpret_cast<const typename U::Coef*>(job.coef), table.first_unit[i]);
    }
  });
}

/// Increments the steps and computes the constants of each tensor, in double, one warp per job, of
/// which the first lane computes. Later phases include the sums of earlier rounds. If found_inf is
/// set, the table is written, for the steps to come, and nothing else.
__global__ void __launch_bounds__(Prepare::kWarps* kLanes, 4) prepare(LB_ARGUMENT(Prepare) call) {
  LB_SHARED(PrepareShared, shared);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  const int i = static_cast<int>(warp_number<Prepare::kWarps>(thread));
  if (i >= call.count) return;
  Job& job = call.table.jobs[i];
  if (call.writes) write_job(call, i, lane);
  if (call.found_inf != nullptr && *call.found_inf != 0.0f) return;
  __syncwarp();  // the first lane reads the job and overwrites some of its words
  if (lane != 0) return;
  if (!call.writes) job.grad = call.grad[i];
  float* const count = call.table.kept[i].step;
  float step = *count;
  if (call.phase == 0) step += 1.0f;
  if (call.phase == 0 && call.table.kept[i].counts) *count = step;
  const int64_t t = llrintf(step);
  double hyper[kRuleHypers];
  for (int k = 0; k < kRuleHypers; ++k) hyper[k] = call.hyper[k];
  if (call.lr != nullptr) hyper[0] = *call.lr;
  const double scale = call.grad_scale != nullptr ? static_cast<double>(*call.grad_scale) : 1.0;
  const double g_scale = (call.maximize ? -1.0 : 1.0) / scale;

  job.random.step = static_cast<uint32_t>(t);
  job.write_param = hyper[0] != 0.0;
  visit(job.rule, UpdateRules{}, [&](auto rule) {
    using U = decltype(rule);
    using Coef = typename U::Coef;
    static_assert(sizeof(Coef) <= sizeof(job.coef) && alignof(Coef) <= 8);
    Coef coef = U::prepare(hyper, t, g_scale);
    if constexpr (rounds_of<U>() > 0) {
      const auto finalize = [&](auto round) {  // a compile-time constant, which rules require
        constexpr int kRound = decltype(round)::kValue;
        if (kRound >= call.phase) return;
        if constexpr (U::grid_factor(kRound) >= 0) {
          if (kRound == call.phase - 1)
            call.table.moves[i] = factor_move<U>(U::grid_factor(kRound), coef);
        }
        finalize_round<U>(kRound, job.totals, job.numel, job.numbers, call.phase == call.phases,
                          shared.digit[thread / kLanes], coef);
      };
      for_each_round<U>(finalize);
    }
    *reinterpret_cast<Coef*>(job.coef) = coef;
  });
  if (call.table.kept[i].fast) set_fast(call.table, i);
}

/// Increments the steps of jobs that several items of a table share, once none of the items reads
/// them any more.
struct Steps {
  static constexpr int kMany = 1024, kThreads = 128;
  const float* found_inf;  // or null
  int count;
  float* step[kMany];
};
__global__ void __launch_bounds__(Steps::kThreads) count_steps(LB_ARGUMENT(Steps) call) {
  if (call.found_inf != nullptr && *call.found_inf != 0.0f) return;
  for (int i = static_cast<int>(threadIdx.x); i < call.count; i += Steps::kThreads)
    *call.step[i] += 1.0f;
}

}  // namespace lowbit::cuda
