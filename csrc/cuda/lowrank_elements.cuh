// APOLLO's passes over the elements of a matrix: the squares of the update, and the step. A warp
// takes kTile columns of a row.
#pragma once

#include "cuda/lowrank.cuh"

namespace lowbit::cuda {

template <class P>
constexpr bool kKeepsBeside = !__is_same(typename P::Extra, None);

/// Loads a parameter, steps it by u and stores it; random16: of its element.
template <class P>
__device__ __forceinline__ void step_element(const LowRankJob& job, int64_t at, float u,
                                             uint32_t random16) {
  auto* param = static_cast<typename P::Storage*>(job.param) + at;
  if constexpr (kKeepsBeside<P>) {
    auto* extra = static_cast<typename P::Extra*>(job.extra) + at;
    typename P::Extra beside = *extra;
    const float p = job.scaling.applied(P::load(*param, beside), u);
    *param = P::store(p, random16, beside);
    *extra = beside;
  } else {
    None none;
    const float p = job.scaling.applied(P::load(*param, none), u);
    *param = P::store(p, random16, none);
  }
}

LB_HD int64_t norm_units(const LowRankJob& job) {
  return job.fira || !job.limits ? 0 : job.rows * row_tiles(job);
}
struct NormShared {
  WarpSum warp[kLowRankWarps];
};

__global__ void __launch_bounds__(kLowRankThreads) lowrank_norm(LB_ARGUMENT(LowRankBatch) batch) {
  LB_SHARED(NormShared, shared);
  if (batch.skipped()) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  WarpSum& sum = shared.warp[thread / kLanes];
  sum.clear(lane);
  int64_t before = -1;
  LB_UNROLL(1)
  for (int64_t i = warp_number<kLowRankWarps>(thread); i < batch.units;
       i += warps<kLowRankWarps>()) {
    const LowRankUnit unit = unit_at(batch, i, lane);
    if (before >= 0 && unit.job != before)
      sum.flush(batch.jobs[before].words + kSquaresOfUpdate * ExactSum::kWords, lane);
    before = unit.job;
    const LowRankJob job = batch.jobs[unit.job];
    const int64_t tiles = row_tiles(job), row = divide(unit.number, tiles);
    const int64_t col = (unit.number - row * tiles) * kTile;
    const int n = static_cast<int>(job.cols - col < kTile ? job.cols - col : kTile);
    visit(job.grad_format, GradFormats{}, [&](auto format) {
      LB_UNROLL(8)
      for (int e = lane; e < n; e += kLanes) {
        const float g = grad_at<decltype(format)>(job, row * job.cols + col + e);
        const float u = job.scaling.unlimited(g, scale_at(job, row, col + e));
        sum.x[e] = u * u;
      }
    });
    sum.add(n, lane);
  }
  if (before >= 0) sum.flush(batch.jobs[before].words + kSquaresOfUpdate * ExactSum::kWords, lane);
}

LB_HD int64_t step_units(const LowRankJob& job) { return job.fira ? 0 : job.rows * row_tiles(job); }
struct StepShared {
  float u[kLowRankWarps][kTile];  // a lane has every 32nd, and nobody else looks at it
  Random8 random[kLowRankWarps][kTile / 8 + 1];
};

__global__ void __launch_bounds__(kLowRankThreads, 2)
    lowrank_step(LB_ARGUMENT(LowRankBatch) batch) {
  LB_SHARED(StepShared, shared);
  if (batch.skipped()) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  float* u = shared.u[thread / kLanes];
  Random8* random = shared.random[thread / kLanes];
  LB_UNROLL(1)
  for (int64_t i = warp_number<kLowRankWarps>(thread); i < batch.units;
       i += warps<kLowRankWarps>()) {
    const LowRankUnit unit = unit_at(batch, i, lane);
    const LowRankJob job = batch.jobs[unit.job];
    if (!job.write) continue;
    const int64_t tiles = row_tiles(job), row = divide(unit.number, tiles);
    const int64_t col = (unit.number - row * tiles) * kTile, first = row * job.cols + col;
    const int n = static_cast<int>(job.cols - col < kTile ? job.cols - col : kTile);
    visit(job.grad_format, GradFormats{}, [&](auto format) {
      LB_UNROLL(8)
      for (int e = lane; e < n; e += kLanes)
        u[e] = job.scaling.limited(grad_at<decltype(format)>(job, first + e),
                                   scale_at(job, row, col + e));
    });
    visit(job.param_format, ParamFormats{}, [&](auto format) {
      using P = decltype(format);
      int skip = 0;
      if constexpr (P::kRandom) {
        const uint64_t index = static_cast<uint64_t>(job.first + first);
        skip = static_cast<int>(index & 7);
        __syncwarp();  // nobody reads the tile before any more
        LB_UNROLL(1)
        for (int group = lane; group * 8 < skip + n; group += kLanes)
          random[group] = random8(job.random, index / 8 + static_cast<uint64_t>(group));
        __syncwarp();
      }
      LB_UNROLL(2)
      for (int e = lane; e < n; e += kLanes) {
        uint32_t random16 = 0;
        if constexpr (P::kRandom) random16 = random[(skip + e) >> 3].bits16((skip + e) & 7);
        step_element<P>(job, first + e, u[e], random16);
      }
    });
  }
}

}  // namespace lowbit::cuda
