// Measured scales on a GPU (cpu/measure.cpp's measure_scales and what ops.cpp does with scales of
// rank 1), with the same results: maxima of integers, so the order does not matter.
#pragma once

#include "cuda/abi.h"
#include "cuda/step.cuh"

namespace lowbit::cuda {

/// Another warp may raise it at the same time; a maximum that is there already costs a read.
__device__ __forceinline__ void raise(uint32_t* most, uint32_t bits) {
  if (*static_cast<volatile uint32_t*>(most) < bits) atomicMax(most, bits);
}

__global__ void __launch_bounds__(kAnyWarps* kLanes, kAnyBlocks) measure_scales(const Batch batch) {
  LB_SHARED(AnyShared, shared);
  if (batch.found_inf != nullptr && *batch.found_inf != 0.0f) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  fill_tables(shared.tables, StateFormats{}, thread, kAnyWarps * kLanes);
  __syncthreads();
  AnyWarp& w = shared.warp[thread / kLanes];
  const Job& job = w.job;
  Place place;
  LB_UNROLL(1)
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kAnyWarps + thread / kLanes; i < batch.tiles;
       i += static_cast<int64_t>(gridDim.x) * kAnyWarps) {
    stage_job(batch, i, lane, w.job, place);
    const int slots = slots_of(job.rule);
    if (!job.measures_scales(slots)) continue;
    const TileAt tile = tile_at(job, i - place.begin);
    LB_UNROLL(1)
    for (int64_t col = tile.col; col < tile.end; col += kTile) {
      const Chunk at = chunk_at(tile, col);
      load_chunk(w, at, slots, lane, shared.tables);
      update_chunk(w, at, lane);
      LB_UNROLL(1)
      for (int k = 0; k < slots; ++k) {
        const StateSlot& slot = job.state[k];
        if (!is_measured(slot.kind)) continue;
        uint32_t most = 0;
        for (int e = lane; e < at.n; e += kLanes) {
          const uint32_t bits = magnitude_bits(w.s[k][e]);
          most = bits > most ? bits : most;
          if (slot.col_next != nullptr) raise(slot.col_next + col + e, bits);
        }
        most = largest(most, kLanes);
        if (lane == 0 && slot.row_next != nullptr)
          raise(slot.row_next + at.row * slot.row_stride, most);
      }
    }
  }
}

/// Measured scales between the phases: what ops.cpp's combine, keep_scales and write_scales do.
enum class ScaleWork : int { kCombineOld, kClear, kKeep, kCombineNew, kWrite };

struct Scales {
  static constexpr int kMany = 160, kBlocksEach = 16, kThreads = 128;
  const float* found_inf;
  int count;
  CudaScale at[kMany];
};
static_assert(sizeof(Scales) <= 32764);

/// Where column c of the parameter lies in dimension d.
__device__ __forceinline__ int64_t index_in(const CudaScale& s, int64_t c, int d) {
  for (int i = s.count - 1; i > d; --i) c = divide(c, s.dims[i]);
  return c - divide(c, s.dims[d]) * s.dims[d];
}

__device__ __forceinline__ void combine(const CudaScale& s, uint32_t* out, int64_t c) {
  uint32_t least = ~0u;
  for (int d = 1; d < s.count; ++d) {
    const uint32_t b = reinterpret_cast<const uint32_t*>(s.most[d])[index_in(s, c, d)];
    least = b < least ? b : least;
  }
  out[c] = least;
}

__device__ __forceinline__ uint32_t kept(uint32_t bits) {
  return bits > kInfinityBits ? kCanonicalNan : bits;
}

__global__ void __launch_bounds__(Scales::kThreads)
    scales(LB_ARGUMENT(Scales) call, const ScaleWork work) {
  if (call.found_inf != nullptr && *call.found_inf != 0.0f) return;
  const CudaScale& s = call.at[blockIdx.x / Scales::kBlocksEach];
  const int64_t begin = blockIdx.x % Scales::kBlocksEach * Scales::kThreads + threadIdx.x,
                stride = Scales::kBlocksEach * Scales::kThreads;
  const bool combined = s.col_most != nullptr;
  if (work == ScaleWork::kWrite) {
    for (int64_t r = begin; s.row_next != nullptr && r < s.rows; r += stride)
      reinterpret_cast<uint32_t*>(s.most[0])[r] = kept(s.row_next[r]);
    auto* cols = reinterpret_cast<uint32_t*>(s.row_next != nullptr ? s.most[1] : s.most[0]);
    for (int64_t c = begin; s.col_next != nullptr && !combined && c < s.cols; c += stride)
      cols[c] = kept(s.col_next[c]);
    return;
  }
  if (!combined) return;
  if (work == ScaleWork::kClear) {
    for (int d = 1; d < s.count; ++d) {
      for (int64_t i = begin; i < s.dims[d]; i += stride) s.most[d][i] = 0.0f;
    }
    return;
  }
  for (int64_t c = begin; c < s.cols; c += stride) {
    if (work == ScaleWork::kCombineOld) combine(s, s.col_most, c);
    if (work == ScaleWork::kCombineNew) combine(s, s.col_next, c);
    if (work == ScaleWork::kKeep) {
      for (int d = 1; d < s.count; ++d)
        raise(reinterpret_cast<uint32_t*>(s.most[d]) + index_in(s, c, d), kept(s.col_next[c]));
    }
  }
}

}  // namespace lowbit::cuda
