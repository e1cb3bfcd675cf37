// Cross-tile scales on a GPU, with the results of the CPU (measure_scales of cpu/measure.cpp and
// the rank-1 scales of csrc/ops/step_cpu.cpp). They are maxima of integers, so the order does not
// matter.
#pragma once

#include "cuda/abi.h"
#include "cuda/step/step.cuh"

namespace lowbit::cuda {

/// Another warp may raise the maximum at the same time. If it is high enough already, this costs
/// one read.
__device__ __forceinline__ void raise(uint32_t* absmax, uint32_t bits) {
  if (*static_cast<volatile uint32_t*>(absmax) < bits) atomicMax(absmax, bits);
}

/// Raises the extremes of the blocks of a cut row, in the form of StateSlot::block_next. A warp has
/// whole blocks of the local part, so no other warp measures these.
__device__ __forceinline__ void raise_blocks(AnyWarp& w, int k, const Chunk& at, int64_t cut,
                                             int lane) {
  const StateSlot& slot = w.job.state[k];
  const BlockAt block = block_of(slot, w.job, cut, at.col);
  uint32_t* next = slot.block_next + 2 * (block.row + block.col);
  LB_UNROLL(1)
  for (int begin = 0; begin < at.n; begin += slot.block, next += 2) {
    const int end = begin + slot.block < at.n ? begin + slot.block : at.n;
    const Extremes e = extremes(w.s[k], begin, end, lane);
    if (lane != 0) continue;
    const uint32_t rest = e.absmin == kNoMin ? 0 : 0x7fffffffu - e.absmin;
    next[0] = e.absmax > next[0] ? e.absmax : next[0];
    next[1] = rest > next[1] ? rest : next[1];
  }
}

__global__ void __launch_bounds__(kAnyWarps* kLanes, kAnyBlocks) measure_scales(const Batch batch) {
  LB_SHARED(AnyShared, shared);
  if (batch.found_inf != nullptr && *batch.found_inf != 0.0f) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  fill_tables(shared.tables, StateFormats{}, thread, kAnyWarps * kLanes);
  __syncthreads();
  AnyWarp& w = shared.warp[thread / kLanes];
  const Job& job = w.job;
  TileRange range;
  LB_UNROLL(1)
  for (int64_t i = warp_number<kAnyWarps>(thread); i < batch.tiles; i += warps<kAnyWarps>()) {
    stage_job(batch, i, lane, w.job, range);
    const int slots = slots_of(job.rule);
    TileAt tile = tile_at(job, i - range.begin);
    tile.row = job.measured_row(tile.row, slots);
    if (!is_here(job, tile)) continue;
    const int64_t cut = job.cut_row(tile.row);
    LB_UNROLL(1)
    for (int64_t col = tile.col; col < tile.end; col += kTile) {
      const Chunk at = chunk_at(job, tile, col);
      load_chunk(w, at, slots, lane, shared.tables);
      update_chunk(w, at, lane);
      LB_UNROLL(1)
      for (int k = 0; k < slots; ++k) {
        const StateSlot& slot = job.state[k];
        if (slot.kind == kBlock && cut >= 0) raise_blocks(w, k, at, cut, lane);
        if (!is_cross_tile(slot.kind)) continue;
        uint32_t absmax = 0;
        for (int e = lane; e < at.n; e += kLanes) {
          if (!at.has(e)) continue;
          const uint32_t bits = magnitude_bits(w.s[k][e]);
          absmax = bits > absmax ? bits : absmax;
          if (slot.col_next != nullptr) raise(slot.col_next + col + e, bits);
        }
        absmax = largest(absmax, kLanes);
        if (lane == 0 && slot.row_next != nullptr)
          raise(slot.row_next + at.row * slot.row_stride, absmax);
      }
    }
  }
}

/// Writes the scales of whole cut rows from the extremes that all ranks measured.
struct CutScales {
  static constexpr int kBlocksEach = 16, kThreads = 128;
};
__device__ __forceinline__ void write_scale(int format, uint32_t absmax, uint32_t absmin,
                                            char* to) {
  const auto write = [&](auto of_format) {
    using Scale = decltype(of_format);
    Scale::of(absmax, absmin).write(reinterpret_cast<typename Scale::Stored*>(to));
  };
  if (kShapes.at[format].entries != 0) return write(BlockScale{});
  visit(format, StateFormats{}, [&](auto f) {
    using F = decltype(f);
    if constexpr (F::kScaled && !IsCodebook<F>) write(typename F::Scale{});
  });
}

__global__ void __launch_bounds__(CutScales::kThreads) cut_scales(const Batch batch) {
  if (batch.found_inf != nullptr && *batch.found_inf != 0.0f) return;
  LB_UNROLL(1)
  for (int64_t i = blockIdx.x / CutScales::kBlocksEach; i < batch.count;
       i += gridDim.x / CutScales::kBlocksEach) {
    const Job& job = batch.jobs[i];
    if (job.cut == kNoCut) continue;
    const int slots = slots_of(job.rule);
    LB_UNROLL(1)
    for (int k = 0; k < slots; ++k) {
      const StateSlot& slot = job.state[k];
      if (slot.kind != kBlock) continue;
      const int64_t cols = job.cut == kCutAll ? job.global_cols : job.cols,
                    blocks = (cols + slot.block - 1) >> (__ffs(slot.block) - 1);
      LB_UNROLL(1)
      for (int64_t cut = blockIdx.x % CutScales::kBlocksEach; cut < job.cut_rows();
           cut += CutScales::kBlocksEach) {
        const int64_t row = job.measured_row(cut, 0);
        LB_UNROLL(1)
        for (int64_t b = threadIdx.x; b < blocks; b += CutScales::kThreads) {
          const uint32_t* next = slot.block_next + 2 * (cut * blocks + b);
          const uint32_t rest = next[1];
          write_scale(slot.format, next[0], rest == 0 ? kNoMin : 0x7fffffffu - rest,
                      static_cast<char*>(slot.scales) +
                          (row * blocks + b) * kShapes.at[slot.format].scale_bytes);
        }
      }
    }
  }
}

/// The work on cross-tile scales between the phases, as combine, keep_scales and write_scales of
/// csrc/ops/step_cpu.cpp do it.
enum class ScaleWork : int { kCombineOld, kClear, kKeep, kCombineNew, kWrite };

struct Scales {
  static constexpr int kMany = 160, kBlocksEach = 16, kThreads = 128;
  const float* found_inf;
  int count;
  CudaScale at[kMany];
};
static_assert(sizeof(Scales) <= 32764);

/// The index of column c of the parameter in dimension d.
__device__ __forceinline__ int64_t index_in(const CudaScale& s, int64_t c, int d) {
  for (int i = s.count - 1; i > d; --i) c = divide(c, s.dims[i]);
  return c - divide(c, s.dims[d]) * s.dims[d];
}

__device__ __forceinline__ void combine(const CudaScale& s, uint32_t* out, int64_t c) {
  uint32_t absmin = ~0u;
  for (int d = 1; d < s.count; ++d) {
    const uint32_t b = reinterpret_cast<const uint32_t*>(s.absmax[d])[index_in(s, c, d)];
    absmin = b < absmin ? b : absmin;
  }
  out[c] = absmin;
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
  const bool combined = s.col_absmax != nullptr;
  if (work == ScaleWork::kWrite) {
    for (int64_t r = begin; s.row_next != nullptr && r < s.rows; r += stride)
      reinterpret_cast<uint32_t*>(s.absmax[0])[r] = kept(s.row_next[r]);
    auto* cols = reinterpret_cast<uint32_t*>(s.row_next != nullptr ? s.absmax[1] : s.absmax[0]);
    for (int64_t c = begin; s.col_next != nullptr && !combined && c < s.cols; c += stride)
      cols[c] = kept(s.col_next[c]);
    return;
  }
  if (!combined) return;
  if (work == ScaleWork::kClear) {
    for (int d = 1; d < s.count; ++d) {
      for (int64_t i = begin; i < s.dims[d]; i += stride) s.absmax[d][i] = 0.0f;
    }
    return;
  }
  for (int64_t c = begin; c < s.cols; c += stride) {
    if (work == ScaleWork::kCombineOld) combine(s, s.col_absmax, c);
    if (work == ScaleWork::kCombineNew) combine(s, s.col_next, c);
    if (work == ScaleWork::kKeep) {
      for (int d = 1; d < s.count; ++d)
        raise(reinterpret_cast<uint32_t*>(s.absmax[d]) + index_in(s, c, d), kept(s.col_next[c]));
    }
  }
}

}  // namespace lowbit::cuda
