// The update on a GPU, with the bits of cpu/step.cpp: one warp per tile, and the tiles of all jobs
// of a batch in one launch.
//
// step_fast: formats fixed at compile time, 8 neighboring values per lane in registers. It requires
// rows that start on a multiple of 8 values (cuda/step.cu decides), so the 8 values of a lane are
// all present or all absent, aligned, and in one Philox group.
//
// step_any: every combination (tile.cuh).
#pragma once

#include "cuda/tile.cuh"

namespace lowbit::cuda {

constexpr int kEach = kTile / kLanes;  // values per lane
constexpr int kFastWarps = 8;

// ---- fixed formats ----

/// How a fixed kernel reads and writes a format: as Device does, except that a codebook with few
/// codes uses a table in shared memory with one bank per entry.
template <class F>
struct Fixed : Device<F> {};
template <class F>
  requires(IsCodebook<F> && F::kBits <= 4)
struct Fixed<F> {
  struct Tables {
    float value[1 << F::kBits], boundary[1 << F::kBits];
  };
  static __device__ __forceinline__ void fill(Tables& t, int thread, int) {
    constexpr int kAt = kBookOffset<F>;
    if (thread < 1 << F::kBits) {
      t.value[thread] = kBooks.value[kAt + thread];
      t.boundary[thread] = kBooks.boundary[kAt + thread];
    }
  }
  static __device__ __forceinline__ float dequantize(uint8_t code, const Tables& t) {
    return t.value[code];
  }
  static __device__ __forceinline__ uint8_t quantize(float z, const Tables& t) {
    uint32_t code = 0;
    for (uint32_t step = 1u << (F::kBits - 1); step != 0; step >>= 1)
      code += z >= t.boundary[code + step] ? step : 0;
    return static_cast<uint8_t>(code);
  }
};

template <class S0, class S1>
struct FastShared {
  typename Fixed<S0>::Tables table0;
  typename Fixed<S1>::Tables table1;
  Job job[kFastWarps];
};

template <class F>
using StatePack = Pack8<typename F::Storage, F::kBits>;

/// The address of the 8 values at `at`, in a row of whole bytes.
template <class F>
__device__ __forceinline__ char* state_at(const StateSlot& slot, int64_t at) {
  return static_cast<char*>(slot.values) + at / 8 * F::kBits;
}

template <class F>
__device__ __forceinline__ void dequantize8(const StateSlot& slot, int64_t at, int64_t block,
                                            bool here, const typename Fixed<F>::Tables& tables,
                                            float (&out)[kEach]) {
  StatePack<F> pack;
  pack.clear();
  if (here) pack = StatePack<F>::load(state_at<F>(slot, at));
  if constexpr (F::kScaled) {
    typename F::Scale scale{};
    if (here)
      scale = F::Scale::read(static_cast<const typename F::Scale::Stored*>(slot.scales) + block);
    for (int e = 0; e < kEach; ++e)
      out[e] = scale.from_z(Fixed<F>::dequantize(pack.get(e), tables));
  } else {
    for (int e = 0; e < kEach; ++e) out[e] = Fixed<F>::dequantize(pack.get(e), tables);
  }
}

template <class F>
__device__ __forceinline__ void quantize8(const float (&x)[kEach], const StateSlot& slot,
                                          int64_t at, int64_t block, bool here, int lane,
                                          const typename Fixed<F>::Tables& tables) {
  using Storage = typename F::Storage;
  StatePack<F> pack;
  pack.clear();
  if constexpr (F::kScaled) {
    using Scale = typename F::Scale;
    static_assert(!Scale::kNeedsMin && Scale::kStored == 1);
    uint32_t absmax = 0;
    for (int e = 0; e < kEach; ++e) {
      const uint32_t magnitude = magnitude_bits(x[e]);
      absmax = magnitude > absmax ? magnitude : absmax;
    }
    const int lanes = slot.block / kEach;
    const Scale scale = Scale::of(largest(here ? absmax : 0, lanes), kNoMin);
    if (!here) return;
    if ((lane & (lanes - 1)) == 0)
      scale.write(static_cast<typename Scale::Stored*>(slot.scales) + block);
    if (scale.coded) {
      for (int e = 0; e < kEach; ++e) pack.set(e, Fixed<F>::quantize(scale.to_z(x[e]), tables));
    } else {
      for (int e = 0; e < kEach; ++e) pack.set(e, static_cast<Storage>(F::kZeroCode));
    }
  } else {
    if (!here) return;
    for (int e = 0; e < kEach; ++e) pack.set(e, Fixed<F>::quantize(x[e], tables));
  }
  pack.store(state_at<F>(slot, at));
}

/// Rule, parameter format, gradient format, and one state format for each slot of the rule.
template <class U, class P, class G, class S0, class S1>
__global__ void __launch_bounds__(kFastWarps* kLanes) step_fast(const Batch batch) {
  static_assert(U::kSlots == 2);
  using Shared = FastShared<S0, S1>;
  LB_SHARED(Shared, shared);
  if (batch.found_inf != nullptr && *batch.found_inf != 0.0f) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes, warp = thread / kLanes;
  Fixed<S0>::fill(shared.table0, thread, kFastWarps * kLanes);
  Fixed<S1>::fill(shared.table1, thread, kFastWarps * kLanes);
  __syncthreads();
  const Job& job = shared.job[warp];
  TileRange range;
  for (int64_t tile = warp_number<kFastWarps>(thread); tile < batch.tiles;
       tile += warps<kFastWarps>()) {
    stage_job(batch, tile, lane, shared.job[warp], range);
    const int64_t tiles_per_row = ceil_div(job.cols, kTile);
    const int64_t row = divide(tile - range.begin, tiles_per_row);
    const int64_t col = (tile - range.begin - row * tiles_per_row) * kTile + lane * kEach;
    const bool here = col < job.cols;
    const int64_t at = row * job.cols + col;
    const int64_t block0 = S0::kScaled ? block_at(job.state[0], job.cols, row, col) : 0;
    const int64_t block1 = S1::kScaled ? block_at(job.state[1], job.cols, row, col) : 0;

    Pack8<typename G::Storage> grad;
    Pack8<typename P::Storage> param;
    CompensationPack<P> compensation;
    grad.clear();
    param.clear();
    compensation.clear();
    if (here) {
      grad =
          Pack8<typename G::Storage>::load(static_cast<const typename G::Storage*>(job.grad) + at);
      param =
          Pack8<typename P::Storage>::load(static_cast<const typename P::Storage*>(job.param) + at);
      if constexpr (kHasCompensation<P>)
        compensation.read(static_cast<const typename P::Compensation*>(job.compensation) + at);
    }
    float s0[kEach], s1[kEach];
    dequantize8<S0>(job.state[0], at, block0, here, shared.table0, s0);
    dequantize8<S1>(job.state[1], at, block1, here, shared.table1, s1);
    Random8 random{};
    if constexpr (P::kRandom)
      random =
          random8(job.random, static_cast<uint64_t>(job.first + row * job.global_cols + col) / 8);
    const typename U::Coef coef = *reinterpret_cast<const typename U::Coef*>(job.coef);
    for (int e = 0; e < kEach; ++e) {
      typename P::Compensation c{};
      if constexpr (kHasCompensation<P>) c = compensation.get(e);
      float p = P::load(param.get(e), c), s[2] = {s0[e], s1[e]};
      U::update(G::load(grad.get(e)), p, s, coef);
      param.set(e, P::store(p, random.bits16(e), c));
      if constexpr (kHasCompensation<P>) compensation.set(e, c);
      s0[e] = s[0];
      s1[e] = s[1];
    }
    if (here && job.write_param) {
      param.store(static_cast<typename P::Storage*>(job.param) + at);
      if constexpr (kHasCompensation<P>)
        compensation.store(static_cast<typename P::Compensation*>(job.compensation) + at);
    }
    if constexpr (S0::kScaled || S1::kScaled)
      __syncwarp();  // memory order: no lane still reads a scale that the first of its block writes
    quantize8<S0>(s0, job.state[0], at, block0, here, lane, shared.table0);
    quantize8<S1>(s1, job.state[1], at, block1, here, lane, shared.table1);
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
  TileRange range;
  LB_UNROLL(1)
  for (int64_t i = warp_number<kAnyWarps>(thread); i < batch.tiles; i += warps<kAnyWarps>()) {
    stage_job(batch, i, lane, w.job, range);
    const TileAt tile = tile_at(job, i - range.begin);
    if (!is_here(job, tile)) continue;
    const int slots = slots_of(job.rule);
    const bool twice = job.tile > kTile;  // blocks of several chunks: measure their maxima first
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
            quantize_slot(w, k, at, first, lane, shared.tables);
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
