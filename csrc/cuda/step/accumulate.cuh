// Adds gradients to their buffers: cpu/gradient.cpp on a GPU. A thread handles the 8 neighbors that
// share random bits, wherever they begin in a row.
#pragma once

#include <vector>

#include "core/accumulate.h"
#include "core/grad.h"
#include "core/param/registry.h"
#include "cuda/abi.h"
#include "cuda/launch.h"
#include "cuda/step/step.cuh"

namespace lowbit::cuda {

constexpr int kAccumulateWarps = 8;

/// The number of groups of 8 that a row of `cols` elements may touch.
LB_HD constexpr int64_t groups_in_row(int64_t cols) { return (cols + 7) / 8 + 1; }

/// The buffers of one launch. A warp takes 32 groups of one of them at a time.
struct Accumulations {
  static constexpr int kMany = 256;
  int64_t count, units;
  int64_t ends[kMany];  // ends[i]: units of buffers 0..i
  Accumulation job[kMany];
};
static_assert(sizeof(Accumulations) <= 32764);  // kernel arguments

/// Adds 8 neighbors of one buffer, or those of them that are in a row.
__device__ __forceinline__ void accumulate_group(const Accumulation& job, int64_t i) {
  const int64_t groups = groups_in_row(job.cols);
  if (i >= job.rows * groups) return;
  const int64_t row = divide(i, groups), begin = job.first + row * job.global_cols;
  const int64_t group = begin / 8 + (i - row * groups);
  // Of the first element of the row; negative at its start.
  const int64_t before = group * 8 - begin;
  const int from = before < 0 ? static_cast<int>(-before) : 0;
  const int to = job.cols - before < 8 ? static_cast<int>(job.cols - before) : 8;
  if (from >= to) return;
  const int64_t at = row * job.cols + before;
  float g[8];
  visit(job.grad_format, GradFormats{}, [&](auto format) {
    using G = decltype(format);
    const auto* grad = static_cast<const typename G::Storage*>(job.grad) + at;
    LB_UNROLL(8)
    for (int e = 0; e < 8; ++e) g[e] = e >= from && e < to ? G::load(grad[e]) : 0.0f;
  });
  visit(job.format, ParamFormats{}, [&](auto format) {
    using P = decltype(format);
    auto* held = static_cast<typename P::Storage*>(job.held) + at;
    Random8 random{};
    if constexpr (P::kRandom)
      random = random8(job.random, static_cast<uint64_t>(group) | kAccumulateSlot);
    LB_UNROLL(8)
    for (int e = 0; e < 8; ++e) {
      if (e < from || e >= to) continue;
      if constexpr (kHasCompensation<P>) {
        auto* compensation = static_cast<typename P::Compensation*>(job.compensation) + at;
        typename P::Compensation c = compensation[e];
        const float x = accumulated(P::load(held[e], c), g[e], job.scale);
        held[e] = P::store(x, random.bits16(e), c);
        compensation[e] = c;
      } else {
        None none;
        const float x = accumulated(P::load(held[e], none), g[e], job.scale);
        held[e] = P::store(x, random.bits16(e), none);
      }
    }
  });
}

__global__ void __launch_bounds__(kAccumulateWarps* kLanes)
    accumulate(LB_ARGUMENT(Accumulations) call) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  LB_UNROLL(1)
  for (int64_t unit = warp_number<kAccumulateWarps>(thread); unit < call.units;
       unit += warps<kAccumulateWarps>()) {
    const int64_t i = find_job(call, unit, lane);
    const int64_t before = i > 0 ? call.ends[i - 1] : 0;
    accumulate_group(call.job[i], (unit - before) * kLanes + lane);
  }
}

/// Adds all gradients of a call, kMany of them in each launch.
inline const char* launch_accumulate(const CudaAccumulation& call) {
  std::vector<Accumulations> room(1);  // on the heap: too large for some stacks
  Accumulations& chunk = room[0];
  for (int64_t at = 0; at < call.count; at += Accumulations::kMany) {
    const int64_t left = call.count - at;
    chunk.count = left < Accumulations::kMany ? left : Accumulations::kMany, chunk.units = 0;
    for (int64_t i = 0; i < chunk.count; ++i) {
      const Accumulation& added = chunk.job[i] = call.jobs[at + i];
      const int64_t groups = added.cols > 0 ? added.rows * groups_in_row(added.cols) : 0;
      chunk.ends[i] = chunk.units += ceil_div(groups, kLanes);
    }
    if (chunk.units == 0) continue;
    int64_t blocks = 0;
    if (const char* error =
            explain(grid(call.device, accumulate, chunk.units, kAccumulateWarps, &blocks),
                    "asking for the device's size"))
      return error;
    if (const char* error = launch(accumulate, blocks, kAccumulateWarps * kLanes, call.stream,
                                   "launching accumulate", chunk))
      return error;
  }
  return nullptr;
}

}  // namespace lowbit::cuda
