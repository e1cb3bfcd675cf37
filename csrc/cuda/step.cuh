// The update on a GPU, with the bits of cpu/step.cpp: one warp for each tile, tiles of all jobs of
// a batch in one launch.
//
// step_fast: formats fixed at compile time, 8 neighbouring values a lane in registers; for jobs
// whose rows start on a multiple of 8 values (cuda/step.cu decides), so a lane's 8 are all there or
// all absent, aligned, and one Philox group.
//
// step_any: every combination (tile.cuh).
#pragma once

#include "cuda/tile.cuh"

namespace lowbit::cuda {

constexpr int kEach = kTile / kLanes;  // values of a lane
constexpr int kFastWarps = 8;

// ---- formats fixed ----

struct FastShared {
  TablesOf<StateFormats> tables;
  Job job[kFastWarps];
};

template <class F>
__device__ __forceinline__ void decode8(const StateSlot& slot, int64_t at, int64_t block, bool here,
                                        const TablesOf<StateFormats>& tables, float (&out)[kEach]) {
  using Storage = typename F::Storage;
  Pack8<Storage> pack;
  pack.clear();
  float scale = 1.0f;
  if (here) {
    pack = Pack8<Storage>::load(static_cast<const Storage*>(slot.values) + at);
    if constexpr (F::kScaled) scale = static_cast<const float*>(slot.scales)[block];
  }
  for (int e = 0; e < kEach; ++e) {
    out[e] = Device<F>::decode(pack.get(e), tables);
    if constexpr (F::kScaled) out[e] *= scale;
  }
}

template <class F>
__device__ __forceinline__ void encode8(const float (&x)[kEach], const StateSlot& slot, int64_t at,
                                        int64_t block, bool here, int lane,
                                        const TablesOf<StateFormats>& tables) {
  using Storage = typename F::Storage;
  Pack8<Storage> pack;
  pack.clear();
  if constexpr (F::kScaled) {
    uint32_t most = 0;
    for (int e = 0; e < kEach; ++e) {
      const uint32_t magnitude = magnitude_bits(x[e]);
      most = magnitude > most ? magnitude : most;
    }
    const int lanes = slot.block / kEach;
    const BlockScale scale = BlockScale::of(largest(here ? most : 0, lanes), kNoLeast);
    if (!here) return;
    if ((lane & (lanes - 1)) == 0) static_cast<float*>(slot.scales)[block] = scale.scale;
    if (scale.coded) {
      for (int e = 0; e < kEach; ++e) pack.set(e, Device<F>::encode(x[e] * scale.inverse, tables));
    } else {
      for (int e = 0; e < kEach; ++e) pack.set(e, static_cast<Storage>(F::kZeroCode));
    }
  } else {
    if (!here) return;
    for (int e = 0; e < kEach; ++e) pack.set(e, Device<F>::encode(x[e], tables));
  }
  pack.store(static_cast<Storage*>(slot.values) + at);
}

/// Rule, parameter, gradient, and one state format for each slot of the rule.
template <class U, class P, class G, class S0, class S1>
__global__ void __launch_bounds__(kFastWarps* kLanes) step_fast(const Batch batch) {
  static_assert(U::kSlots == 2);
  LB_SHARED(FastShared, shared);
  if (batch.found_inf != nullptr && *batch.found_inf != 0.0f) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes, warp = thread / kLanes;
  fill_tables(shared.tables, Types<S0, S1>{}, thread, kFastWarps * kLanes);
  __syncthreads();
  const Job& job = shared.job[warp];
  Place place;
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kFastWarps + warp; tile < batch.tiles;
       tile += static_cast<int64_t>(gridDim.x) * kFastWarps) {
    stage_job(batch, tile, lane, shared.job[warp], place);
    const int64_t tiles_per_row = ceil_div(job.cols, kTile);
    const int64_t row = divide(tile - place.begin, tiles_per_row);
    const int64_t col = (tile - place.begin - row * tiles_per_row) * kTile + lane * kEach;
    const bool here = col < job.cols;
    const int64_t at = row * job.cols + col;
    const int64_t block0 = S0::kScaled ? block_at(job.state[0], job.cols, row, col) : 0;
    const int64_t block1 = S1::kScaled ? block_at(job.state[1], job.cols, row, col) : 0;

    Pack8<typename G::Storage> grad;
    Pack8<typename P::Storage> param;
    grad.clear();
    param.clear();
    if (here) {
      grad =
          Pack8<typename G::Storage>::load(static_cast<const typename G::Storage*>(job.grad) + at);
      param =
          Pack8<typename P::Storage>::load(static_cast<const typename P::Storage*>(job.param) + at);
    }
    float s0[kEach], s1[kEach];
    decode8<S0>(job.state[0], at, block0, here, shared.tables, s0);
    decode8<S1>(job.state[1], at, block1, here, shared.tables, s1);
    Random8 random{};
    if constexpr (P::kRandom)
      random =
          random8(job.random, static_cast<uint64_t>(job.first + row * job.global_cols + col) / 8);
    const typename U::Coef coef = *reinterpret_cast<const typename U::Coef*>(job.coef);
    for (int e = 0; e < kEach; ++e) {
      None none;
      float p = P::load(param.get(e), none), s[2] = {s0[e], s1[e]};
      U::update(G::load(grad.get(e)), p, s, coef);
      param.set(e, P::store(p, random.bits16(e), none));
      s0[e] = s[0];
      s1[e] = s[1];
    }
    if (here && job.write_param) param.store(static_cast<typename P::Storage*>(job.param) + at);
    encode8<S0>(s0, job.state[0], at, block0, here, lane, shared.tables);
    encode8<S1>(s1, job.state[1], at, block1, here, lane, shared.tables);
  }
}

// ---- any formats ----

__global__ void __launch_bounds__(kAnyWarps* kLanes, kAnyBlocks) step_any(const Batch batch) {
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
    const TileAt tile = tile_at(job, i - place.begin);
    if (!is_here(job, tile)) continue;
    const int slots = slots_of(job.rule);
    const bool twice = job.tile > kTile;  // blocks of several chunks: their maxima first
    if (twice) forget_blocks(w, lane);
    LB_UNROLL(1)
    for (int pass = twice ? 0 : 1; pass < 2; ++pass) {
      LB_UNROLL(1)
      for (int64_t col = tile.col; col < tile.end; col += kTile) {
        const Chunk at = chunk_at(job, tile, col);
        const int first = static_cast<int>(col - tile.col);
        load_chunk(w, at, slots, lane, shared.tables);
        update_chunk(w, at, lane);
        LB_UNROLL(1)
        for (int k = 0; k < slots; ++k) {
          if (pass == 1) {
            encode_slot(w, k, at, first, lane, shared.tables);
          } else if (is_long(job.state[k])) {
            measure_blocks(w, k, at, first, lane);
          }
        }
        if (pass == 1 && job.write_param) store_param(w, at, lane);
      }
    }
  }
}

}  // namespace lowbit::cuda
