// Many jobs in one launch: a table of jobs in the workspace, filled on the device by `prepare`, and
// the running sum of their tiles, by which a warp finds its job.
#pragma once

#include "core/finalize.h"
#include "core/job.h"
#include "cuda/warp.cuh"

namespace lowbit::cuda {

/// The jobs of one kernel.
struct Batch {
  const Job* jobs;
  const int64_t* ends;  // ends[i]: tiles (or other units) of jobs 0..i
  int64_t count, tiles;
  const float* found_inf;  // or null
};

/// The tiles [begin, end) of the job that a warp has in shared memory.
struct TileRange {
  int64_t begin = 0, end = 0;
};

/// Makes `staged` the job of the tile. All lanes take part.
__device__ __forceinline__ void stage_job(const Batch& batch, int64_t tile, int lane, Job& staged,
                                          TileRange& range) {
  if (tile < range.end) return;
  const int64_t i = find_job(batch, tile, lane);
  range.begin = i > 0 ? batch.ends[i - 1] : 0;
  range.end = batch.ends[i];
  const auto* from = reinterpret_cast<const Word*>(batch.jobs + i);
  auto* to = reinterpret_cast<Word*>(&staged);
  static_assert(sizeof(Job) % sizeof(uint64_t) == 0 && alignof(Job) == alignof(uint64_t));
  __syncwarp();  // memory order: no lane still reads the previous job, all have voted
  for (int w = lane; w < static_cast<int>(sizeof(Job) / sizeof(uint64_t)); w += kLanes)
    to[w] = from[w];
  __syncwarp();
}

template <class... U>
constexpr int max_slots(Types<U...>) {
  int maximum = 0;
  ((maximum = U::kSlots > maximum ? U::kSlots : maximum), ...);
  return maximum;
}
template <class... U>
constexpr int max_hypers(Types<U...>) {
  int maximum = 0;
  ((maximum = U::kHypers > maximum ? U::kHypers : maximum), ...);
  return maximum;
}

template <int kRound>
struct Round {
  static constexpr int kValue = kRound;
};
/// Calls fn(Round<r>{}) for each round of a rule.
template <class U, class Fn>
__device__ __forceinline__ void for_each_round(const Fn& fn) {
  static_assert(rounds_of<U>() <= 3);
  if constexpr (rounds_of<U>() > 0) fn(Round<0>{});
  if constexpr (rounds_of<U>() > 1) fn(Round<1>{});
  if constexpr (rounds_of<U>() > 2) fn(Round<2>{});
}

constexpr int kRuleSlots = max_slots(UpdateRules{}), kRuleHypers = max_hypers(UpdateRules{});

/// The tables in the workspace, with one entry per job.
struct Table {
  Job* jobs;
  int64_t* ends;         // running tiles within the batch of a kernel
  int64_t* matrix_ends;  // running matrices (Job::batches) of all jobs
  FactorMove* moves;     // of the factored moment whose sums are being finalized
};

/// The part of the job table that one launch of `prepare` writes. It is passed by value, so a
/// captured graph has its own copy. Kernel arguments are limited to 32764 bytes and most of a job
/// equals the previous one, so each job contributes only the words that differ from the first job.
struct Prepare {
  static constexpr int kWarps = 4, kJobs = 256, kWords = 2300;
  static constexpr int kJobWords =
      static_cast<int>(__builtin_offsetof(Job, coef) / sizeof(uint64_t));
  struct Item {
    int64_t end, matrix_end;
    float* step;
    uint64_t differs[2];  // one bit for each word of the job
    int at;               // index of its first word
    bool counts;          // whether this item increments the step
  };
  static_assert(kJobWords <= 128 && __builtin_offsetof(Job, coef) % sizeof(uint64_t) == 0);
  Table table;
  const float *lr, *grad_scale, *found_inf;  // or null
  double hyper[kRuleHypers];
  int count, maximize, phase, phases;
  uint64_t first[kJobWords];
  Item item[kJobs];
  uint64_t words[kWords];
};
static_assert(sizeof(Prepare) <= 32764);

struct PrepareShared {
  int64_t digit[Prepare::kWarps][ExactSum::kWords];
};

/// Increments the steps and computes the constants of each tensor, in double, one warp per job. The
/// lanes copy the words of the job in parallel, and the first lane computes. Later phases include
/// the sums of earlier rounds. If found_inf is set, nothing is changed.
__global__ void __launch_bounds__(Prepare::kWarps* kLanes) prepare(LB_ARGUMENT(Prepare) call) {
  LB_SHARED(PrepareShared, shared);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  const int i = static_cast<int>(warp_number<Prepare::kWarps>(thread));
  if (i >= call.count) return;
  if (call.found_inf != nullptr && *call.found_inf != 0.0f) return;
  const Prepare::Item& item = call.item[i];
  Job& job = call.table.jobs[i];
  auto* words = reinterpret_cast<Word*>(&job);
  for (int w = lane; w < Prepare::kJobWords; w += kLanes) {
    const uint64_t up_to = item.differs[w / 64] << (63 - w % 64);  // its own bit is the first
    const int before = (w < 64 ? 0 : __popcll(item.differs[0])) + __popcll(up_to << 1);
    words[w] = up_to >> 63 ? call.words[item.at + before] : call.first[w];
  }
  __syncwarp();  // the first lane reads the job and overwrites some of its words
  if (lane != 0) return;
  float step = *item.step;
  if (call.phase == 0) step += 1.0f;
  if (call.phase == 0 && item.counts) *item.step = step;
  const int64_t t = llrintf(step);
  double hyper[kRuleHypers];
  for (int k = 0; k < kRuleHypers; ++k) hyper[k] = call.hyper[k];
  if (call.lr != nullptr) hyper[0] = *call.lr;
  const double scale = call.grad_scale != nullptr ? static_cast<double>(*call.grad_scale) : 1.0;
  const double g_scale = (call.maximize ? -1.0 : 1.0) / scale;

  call.table.ends[i] = item.end;
  call.table.matrix_ends[i] = item.matrix_end;
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
