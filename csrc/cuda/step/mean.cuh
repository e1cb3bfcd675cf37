// Means of gradients that do not depend on the order of the addends: cpu/mean.cpp on a GPU. A
// thread handles one element.
#pragma once

#include "core/grad.h"
#include "core/mean_bins.h"
#include "cuda/abi.h"
#include "cuda/launch.h"
#include "cuda/step/step.cuh"

namespace lowbit::cuda {

constexpr int kMeanWarps = 8;

__device__ __forceinline__ uint64_t add_rows(const MeanSum& sum, int64_t i, uint64_t word) {
  if (sum.addend_format == MeanSum::kWords) {
    const auto* rows = static_cast<const uint64_t*>(sum.addends) + i;
    LB_UNROLL(1)
    for (int64_t row = 0; row < sum.rows; ++row) word = bin_merge(word, rows[row * sum.stride]);
    return word;
  }
  visit(sum.addend_format, GradFormats{}, [&](auto format) {
    using G = decltype(format);
    const auto* rows = static_cast<const typename G::Storage*>(sum.addends) + i;
    LB_UNROLL(1)
    for (int64_t row = 0; row < sum.rows; ++row)
      word = bin_add(word, G::load(rows[row * sum.stride]), sum.width);
  });
  return word;
}

__global__ void __launch_bounds__(kMeanWarps* kLanes) add_means(const MeanSum sum) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  const int64_t units = ceil_div(sum.n, kLanes);
  LB_UNROLL(1)
  for (int64_t unit = warp_number<kMeanWarps>(thread); unit < units; unit += warps<kMeanWarps>()) {
    const int64_t i = unit * kLanes + lane;
    if (i >= sum.n) continue;
    const uint64_t word = add_rows(sum, i, sum.words != nullptr ? sum.words[i] : 0);
    if (sum.mean == nullptr) {
      sum.words[i] = word;
      continue;
    }
    visit(sum.mean_format, GradFormats{}, [&](auto format) {
      using Storage = typename decltype(format)::Storage;
      // Rounded to odd, then to 16 bits: one rounding.
      const float mean = bin_mean(word, sum.width, sum.divisor, sizeof(Storage) < 4);
      static_cast<Storage*>(sum.mean)[i] = decltype(format)::nearest(mean);
    });
  }
}

inline const char* launch_means(const CudaMeans& call) {
  for (int64_t i = 0; i < call.count; ++i) {
    const MeanSum& sum = call.jobs[i];
    if (sum.n == 0) continue;
    int64_t blocks = 0;
    if (const char* error =
            explain(grid(call.device, add_means, ceil_div(sum.n, kLanes), kMeanWarps, &blocks),
                    "asking for the device's size"))
      return error;
    if (const char* error =
            launch(add_means, blocks, kMeanWarps * kLanes, call.stream, "launching add_means", sum))
      return error;
  }
  return nullptr;
}

}  // namespace lowbit::cuda
