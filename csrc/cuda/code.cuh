// Float32 values to codes and scales and back, a warp for each tile, any format: the leaves of
// step_any without a step.
#pragma once

#include "cuda/abi.h"
#include "cuda/step.cuh"

namespace lowbit::cuda {

struct CodeShared {
  TablesOf<StateFormats> tables;
};

template <bool kEncode>
__global__ void __launch_bounds__(kAnyWarps* kLanes, 4) code(const CudaCode call) {
  LB_SHARED(CodeShared, shared);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  fill_tables(shared.tables, StateFormats{}, thread, kAnyWarps * kLanes);
  __syncthreads();
  const StateSlot slot{call.codes, call.scales, call.format, call.block};
  const int64_t tiles_per_row = ceil_div(call.cols, kTile);
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kAnyWarps + thread / kLanes;
       tile < call.rows * tiles_per_row; tile += static_cast<int64_t>(gridDim.x) * kAnyWarps) {
    const int64_t row = divide(tile, tiles_per_row), col = (tile - row * tiles_per_row) * kTile;
    const int n = static_cast<int>(call.cols - col < kTile ? call.cols - col : kTile);
    float* values = call.values + row * call.cols + col;
    const SlotAt at = slot_at(slot, call.cols, row, col);
    visit(call.format, StateFormats{}, [&](auto format) {
      using F = decltype(format);
      if constexpr (kEncode) {
        encode_leaf<F>(values, at.values, at.scales, call.block, n, lane, shared.tables);
      } else {
        decode_leaf<F>(at.values, at.scales, call.block, values, n, lane, shared.tables);
      }
    });
  }
}

}  // namespace lowbit::cuda
