// Many jobs in one launch: a table of jobs in the workspace, filled on the device by `prepare`, and
// the running sum of their tiles by which a warp finds its own.
#pragma once

#include "core/settle.h"
#include "cuda/warp.cuh"
#include "job.h"

namespace lowbit::cuda {

/// The jobs that one kernel serves.
struct Batch {
  const Job* jobs;
  const int64_t* ends;  // ends[i]: tiles of jobs 0..i, or what else is counted
  int64_t count, tiles;
  const float* found_inf;  // or null
};

/// Where a warp is: the tiles [begin, end) belong to the job that it holds in shared memory.
struct Place {
  int64_t begin = 0, end = 0;
};

/// Makes `staged` the tile's job; all lanes.
__device__ __forceinline__ void stage_job(const Batch& batch, int64_t tile, int lane, Job& staged,
                                          Place& place) {
  if (tile < place.end) return;
  const int64_t i = find_job(batch, tile, lane);
  place.begin = i > 0 ? batch.ends[i - 1] : 0;
  place.end = batch.ends[i];
  const auto* from = reinterpret_cast<const Word*>(batch.jobs + i);
  auto* to = reinterpret_cast<Word*>(&staged);
  static_assert(sizeof(Job) % sizeof(uint64_t) == 0 && alignof(Job) == alignof(uint64_t));
  __syncwarp();  // memory order: no lane still reads the job before, all have voted
  for (int w = lane; w < static_cast<int>(sizeof(Job) / sizeof(uint64_t)); w += kLanes)
    to[w] = from[w];
  __syncwarp();
}

template <class... U>
constexpr int most_slots(Types<U...>) {
  int most = 0;
  ((most = U::kSlots > most ? U::kSlots : most), ...);
  return most;
}
template <class... U>
constexpr int most_hypers(Types<U...>) {
  int most = 0;
  ((most = U::kHypers > most ? U::kHypers : most), ...);
  return most;
}

template <int kRound>
struct Round {
  static constexpr int kValue = kRound;
};
/// Calls fn(Round<r>{}) for the rounds of a rule.
template <class U, class Fn>
__device__ __forceinline__ void for_each_round(const Fn& fn) {
  static_assert(rounds_of<U>() <= 3);
  if constexpr (rounds_of<U>() > 0) fn(Round<0>{});
  if constexpr (rounds_of<U>() > 1) fn(Round<1>{});
  if constexpr (rounds_of<U>() > 2) fn(Round<2>{});
}

constexpr int kMostSlots = most_slots(UpdateRules{}), kMostHypers = most_hypers(UpdateRules{});

/// What the table in the workspace holds beside the jobs, an entry for each.
struct Table {
  Job* jobs;
  int64_t* ends;         // running tiles within a kernel's batch
  int64_t* matrix_ends;  // running matrices (Job::batches) of all jobs
  FactorMove* moves;     // of the factored moment whose sums are settled
};

/// The part of the job table that one launch of `prepare` writes, handed over by value: a captured
/// graph keeps its own copy. Kernel arguments end at 32764 bytes, and most of a job is like the one
/// before, so of each only the words are here in which it differs from the first.
struct Prepare {
  static constexpr int kWarps = 4, kJobs = 256, kWords = 2300;
  static constexpr int kJobWords =
      static_cast<int>(__builtin_offsetof(Job, coef) / sizeof(uint64_t));
  struct Item {
    int64_t end, matrix_end;
    float* step;
    uint64_t differs[2];  // a bit for each word of the job
    int at;               // its words among all
    bool counts;          // whether it is this item that increments the step
  };
  static_assert(kJobWords <= 128 && __builtin_offsetof(Job, coef) % sizeof(uint64_t) == 0);
  Table table;
  const float *lr, *grad_scale, *found_inf;  // or null
  double hyper[kMostHypers];
  int count, maximize, phase, phases;
  uint64_t first[kJobWords];
  Item item[kJobs];
  uint64_t words[kWords];
};
static_assert(sizeof(Prepare) <= 32764);

struct PrepareShared {
  int64_t digit[Prepare::kWarps][ExactSum::kWords];
};

/// Counts the steps and computes what is constant over a tensor, in double, one warp for each job:
/// its lanes write the job's words side by side, the first computes. In later phases with what the
/// sums of the rounds before say. Nothing where found_inf is set.
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
  __syncwarp();  // the first lane reads the job, and writes some of its words again
  if (lane != 0) return;
  float step = *item.step;
  if (call.phase == 0) step += 1.0f;
  if (call.phase == 0 && item.counts) *item.step = step;
  const int64_t t = llrintf(step);
  double hyper[kMostHypers];
  for (int k = 0; k < kMostHypers; ++k) hyper[k] = call.hyper[k];
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
      const auto settle = [&](auto round) {  // a constant: rules ask for it at compile time
        constexpr int kRound = decltype(round)::kValue;
        if (kRound >= call.phase) return;
        if constexpr (U::grid_factor(kRound) >= 0) {
          if (kRound == call.phase - 1)
            call.table.moves[i] = factor_move<U>(U::grid_factor(kRound), coef);
        }
        settle_round<U>(kRound, job.totals, job.numel, job.numbers, call.phase == call.phases,
                        shared.digit[thread / kLanes], coef);
      };
      for_each_round<U>(settle);
    }
    *reinterpret_cast<Coef*>(job.coef) = coef;
  });
}

/// Increments the steps of jobs that several items of a table share, when none of them reads it any
/// more.
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
