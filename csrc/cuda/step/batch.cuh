// Many jobs in one launch: a table of jobs on the device, which `prepare` fills (prepare.cuh).
//
// The update deals units to warps: up to Units::group neighboring tiles of one job. The table lists
// the job of each unit, so a warp finds it by one load. What measures deals tiles, and a warp finds
// its job in the running sum of their numbers.
#pragma once

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

/// The jobs of one kernel of the update, in units.
struct Units {
  const Job* jobs;
  const void* fast;            // the FastJobs of a fixed kernel, kFastBytes each
  const uint32_t* job_of;      // of each unit
  const uint32_t* first_unit;  // of each job
  uint32_t units;
  uint32_t group;          // tiles of a unit, the last one of a job excepted
  const float* found_inf;  // or null
};

/// Copies to shared memory, by all lanes of a warp.
__device__ __forceinline__ void copy_words(void* to, const void* from, int bytes, int lane) {
  auto* out = static_cast<Word*>(to);
  const auto* in = static_cast<const Word*>(from);
  for (int w = lane; w < bytes / static_cast<int>(sizeof(Word)); w += kLanes) out[w] = in[w];
}

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
  static_assert(sizeof(Job) % sizeof(Word) == 0 && alignof(Job) == alignof(Word));
  __syncwarp();  // memory order: no lane still reads the previous job, all have voted
  copy_words(&staged, batch.jobs + i, sizeof(Job), lane);
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

}  // namespace lowbit::cuda
