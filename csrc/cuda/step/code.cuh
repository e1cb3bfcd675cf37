// Quantizes and dequantizes float32 values, one warp per tile, in any format: the kernels of
// step_any without a step.
#pragma once

#include "cuda/abi.h"
#include "cuda/step/step.cuh"

namespace lowbit::cuda {

template <bool kQuantize>
__global__ void __launch_bounds__(kAnyWarps* kLanes, kAnyBlocks) code(const CudaCode call) {
  LB_SHARED(AnyShared, shared);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  fill_tables(shared.tables, StateFormats{}, thread, kAnyWarps * kLanes);
  __syncthreads();
  AnyWarp& w = shared.warp[thread / kLanes];
  Job& job = w.job;
  if (lane == 0) {
    job.rows = call.rows, job.cols = call.cols, job.front = 0, job.back = 0, job.cut = kNoCut;
    job.tile = call.block > kTile ? call.block : kTile;
    StateSlot slot{};
    slot.values = call.codes, slot.scales = call.scales;
    slot.format = call.format, slot.block = call.block, slot.kind = kBlock;
    job.state[0] = slot;
  }
  __syncwarp();
  const int64_t tiles = call.rows * ceil_div(call.cols, job.tile);
  LB_UNROLL(1)
  for (int64_t i = warp_number<kAnyWarps>(thread); i < tiles; i += warps<kAnyWarps>()) {
    const TileAt tile = tile_at(job, i);
    const bool twice = kQuantize && job.tile > kTile;
    if (twice) forget_blocks(w, lane);
    LB_UNROLL(1)
    for (int pass = twice ? 0 : 1; pass < 2; ++pass) {
      LB_UNROLL(1)
      for (int64_t col = tile.col; col < tile.end; col += kTile) {
        const Chunk at = chunk_at(job, tile, col);
        const int first = static_cast<int>(col - tile.col);
        float* values = call.values + at.row * call.cols + at.col;
        if constexpr (kQuantize) {
          for (int e = lane; e < at.n; e += kLanes) w.s[0][e] = values[e];
          if (pass == 0) {
            measure_blocks(w, 0, at, first, lane);
          } else {
            quantize_slot(w, 0, at, first, lane, shared.tables);
          }
        } else {
          dequantize_slot(w, 0, at, lane, shared.tables);
          for (int e = lane; e < at.n; e += kLanes) values[e] = w.s[0][e];
        }
      }
    }
  }
}

}  // namespace lowbit::cuda
