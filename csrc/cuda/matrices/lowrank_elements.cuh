// APOLLO's passes over the elements of a matrix: the squares of the update, and the step. A warp
// processes kTile columns of a row.
#pragma once

#include "cuda/matrices/lowrank.cuh"

namespace lowbit::cuda {

/// Loads one parameter, steps it by u and stores it. random16: the random bits of the element.
template <class P>
__device__ __forceinline__ void step_element(const LowRankJob& job, int64_t at, float u,
                                             uint32_t random16) {
  auto* param = static_cast<typename P::Storage*>(job.param) + at;
  if constexpr (kHasCompensation<P>) {
    auto* compensation = static_cast<typename P::Compensation*>(job.compensation) + at;
    typename P::Compensation c = *compensation;
    const float p = job.scaling.applied(P::load(*param, c), u);
    *param = P::store(p, random16, c);
    *compensation = c;
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

/// Whether the 8 neighbors of a lane always exist, are aligned for 16-byte accesses, and share
/// random bits.
__device__ __forceinline__ bool by_eights(const LowRankJob& job) {
  const auto aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  return job.cols % 8 == 0 && job.first % 8 == 0 && aligned(job.param) && aligned(job.grad) &&
         aligned(job.compensation);
}

/// Steps 8 elements of a row, from `col` on, by one lane.
__device__ __forceinline__ void step_eight(const LowRankJob& job, int64_t row, int64_t col) {
  const int64_t at = row * job.cols + col;
  float u[8];
  visit(job.grad_format, GradFormats{}, [&](auto format) {
    using Stored = typename decltype(format)::Storage;
    const auto grad = Pack8<Stored>::load(static_cast<const Stored*>(job.grad) + at);
    LB_UNROLL(8)
    for (int e = 0; e < 8; ++e)
      u[e] = job.scaling.limited(decltype(format)::load(grad.get(e)) * job.g_scale,
                                 scale_at(job, row, col + e));
  });
  visit(job.param_format, ParamFormats{}, [&](auto format) {
    using P = decltype(format);
    auto* to = static_cast<typename P::Storage*>(job.param) + at;
    auto param = Pack8<typename P::Storage>::load(to);
    CompensationPack<P> compensation;
    if constexpr (kHasCompensation<P>)
      compensation.read(static_cast<const typename P::Compensation*>(job.compensation) + at);
    Random8 random{};
    if constexpr (P::kRandom)
      random = random8(job.random, static_cast<uint64_t>(job.first + at) / 8);
    LB_UNROLL(8)
    for (int e = 0; e < 8; ++e) {
      typename P::Compensation c{};
      if constexpr (kHasCompensation<P>) c = compensation.get(e);
      const float p = job.scaling.applied(P::load(param.get(e), c), u[e]);
      param.set(e, P::store(p, random.bits16(e), c));
      if constexpr (kHasCompensation<P>) compensation.set(e, c);
    }
    param.store(to);
    if constexpr (kHasCompensation<P>)
      compensation.store(static_cast<typename P::Compensation*>(job.compensation) + at);
  });
}

LB_HD int64_t step_units(const LowRankJob& job) { return job.fira ? 0 : job.rows * row_tiles(job); }
struct StepShared {
  float u[kLowRankWarps][kTile];  // a lane has every 32nd, and no other lane reads it
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
    if (by_eights(job)) {
      if (8 * lane < n) step_eight(job, row, col + 8 * lane);
      continue;
    }
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
        __syncwarp();  // no lane still reads the previous tile
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
