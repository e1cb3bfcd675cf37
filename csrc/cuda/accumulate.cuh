// Adds a gradient to its buffer: cpu/gradient.cpp on a GPU. A thread handles the 8 neighbors that
// share random bits, wherever they begin in a row.
#pragma once

#include "core/accumulate.h"
#include "core/registry.h"
#include "cuda/abi.h"
#include "cuda/step.cuh"

namespace lowbit::cuda {

constexpr int kAccumulateWarps = 8;

/// The number of groups of 8 that a row of `cols` elements may touch.
LB_HD constexpr int64_t groups_in_row(int64_t cols) { return (cols + 7) / 8 + 1; }

__global__ void __launch_bounds__(kAccumulateWarps* kLanes) accumulate(const Accumulation call) {
  const int64_t groups = groups_in_row(call.cols), all = call.rows * groups;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kAccumulateWarps * kLanes;
  LB_UNROLL(1)
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kAccumulateWarps * kLanes + threadIdx.x;
       i < all; i += stride) {
    const int64_t row = divide(i, groups), begin = call.first + row * call.global_cols;
    const int64_t group = begin / 8 + (i - row * groups);
    // Of the first element of the row; negative at its start.
    const int64_t before = group * 8 - begin;
    const int from = before < 0 ? static_cast<int>(-before) : 0;
    const int to = call.cols - before < 8 ? static_cast<int>(call.cols - before) : 8;
    if (from >= to) continue;
    const int64_t at = row * call.cols + before;
    float g[8];
    visit(call.grad_format, GradFormats{}, [&](auto format) {
      using G = decltype(format);
      const auto* grad = static_cast<const typename G::Storage*>(call.grad) + at;
      LB_UNROLL(8)
      for (int e = 0; e < 8; ++e) g[e] = e >= from && e < to ? G::load(grad[e]) : 0.0f;
    });
    visit(call.format, ParamFormats{}, [&](auto format) {
      using P = decltype(format);
      auto* held = static_cast<typename P::Storage*>(call.held) + at;
      Random8 random{};
      if constexpr (P::kRandom)
        random = random8(call.random, static_cast<uint64_t>(group) | kAccumulateSlot);
      LB_UNROLL(8)
      for (int e = 0; e < 8; ++e) {
        if (e < from || e >= to) continue;
        if constexpr (kHasCompensation<P>) {
          auto* compensation = static_cast<typename P::Compensation*>(call.compensation) + at;
          typename P::Compensation c = compensation[e];
          const float x = accumulated(P::load(held[e], c), g[e], call.scale);
          held[e] = P::store(x, random.bits16(e), c);
          compensation[e] = c;
        } else {
          None none;
          const float x = accumulated(P::load(held[e], none), g[e], call.scale);
          held[e] = P::store(x, random.bits16(e), none);
        }
      }
    });
  }
}

}  // namespace lowbit::cuda
