// The walk on a GPU, with the bits of cpu/step.cpp: one warp for each tile of 256 values, tiles of
// all jobs of a batch in one launch.
//
// step_fast: formats fixed at compile time, 8 neighbouring values a lane in registers; for jobs
// whose rows start on a multiple of 8 values (cuda/step.cu decides), so a lane's 8 are all there or
// all absent, aligned, and one Philox group.
//
// step_any: every combination. Each lane takes every 32nd value, formats are switched per tile,
// values wait in shared memory.
#pragma once

#include "core/scale/block.h"
#include "cuda/batch.cuh"
#include "cuda/dynamic8.cuh"

namespace lowbit::cuda {

constexpr int kEach = kTile / kLanes;  // values of a lane
constexpr int kFastWarps = 8, kAnyWarps = 4;

/// The largest of the values that `lanes` neighbouring lanes hold, a power of two.
__device__ __forceinline__ uint32_t largest(uint32_t mine, int lanes) {
  for (int span = 1; span < lanes; span <<= 1) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, mine, span);
    mine = other > mine ? other : mine;
  }
  return mine;
}

/// The index of the scale that belongs to (row, col). Block lengths divide kTile, so they are
/// powers of two.
__device__ __forceinline__ int64_t block_at(const StateSlot& slot, int64_t cols, int64_t row,
                                            int64_t col) {
  const int shift = __ffs(slot.block) - 1;
  return row * ((cols + slot.block - 1) >> shift) + (col >> shift);
}

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
    if constexpr (F::kScaled) scale = slot.scales[block];
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
    const BlockScale scale = BlockScale::of(largest(here ? most : 0, lanes));
    if (!here) return;
    if ((lane & (lanes - 1)) == 0) slot.scales[block] = scale.scale;
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
      float p = P::load(param.get(e)), s[2] = {s0[e], s1[e]};
      U::update(G::load(grad.get(e)), p, s, coef);
      param.set(e, P::store(p, random.bits16(e)));
      s0[e] = s[0];
      s1[e] = s[1];
    }
    if (here && job.write_param) param.store(static_cast<typename P::Storage*>(job.param) + at);
    encode8<S0>(s0, job.state[0], at, block0, here, lane, shared.tables);
    encode8<S1>(s1, job.state[1], at, block1, here, lane, shared.tables);
  }
}

// ---- any formats: the leaves of cpu/leaves.inl, for a warp ----

template <class F>
__device__ __forceinline__ void load_leaf(const void* stored, float* out, int n, int lane) {
  const auto* in = static_cast<const typename F::Storage*>(stored);
  for (int i = lane; i < n; i += kLanes) out[i] = F::load(in[i]);
}

template <class F>
__device__ __forceinline__ void decode_leaf(const void* codes, const float* scales, int block,
                                            float* out, int n, int lane,
                                            const TablesOf<StateFormats>& tables) {
  const auto* in = static_cast<const typename F::Storage*>(codes);
  const int shift = __ffs(block) - 1;
  for (int i = lane; i < n; i += kLanes) {
    float x = Device<F>::decode(in[i], tables);
    if constexpr (F::kScaled) x *= scales[i >> shift];
    out[i] = x;
  }
}

template <class F>
__device__ __forceinline__ void encode_leaf(const float* x, void* codes, float* scales, int block,
                                            int n, int lane, const TablesOf<StateFormats>& tables) {
  auto* out = static_cast<typename F::Storage*>(codes);
  if constexpr (F::kScaled) {
    const int shift = __ffs(block) - 1;
    const int width =
        block < kLanes ? kLanes : block;  // short blocks side by side in one row of lanes
    for (int start = 0; start < n; start += width) {
      const int end = n - start < width ? n : start + width;
      uint32_t most = 0;
      for (int i = start + lane; i < end; i += kLanes) {
        const uint32_t magnitude = magnitude_bits(x[i]);
        most = magnitude > most ? magnitude : most;
      }
      const BlockScale scale = BlockScale::of(largest(most, block < kLanes ? block : kLanes));
      for (int i = start + lane; i < end; i += kLanes) {
        if ((i & (block - 1)) == 0) scales[i >> shift] = scale.scale;
        out[i] = scale.coded ? Device<F>::encode(x[i] * scale.inverse, tables)
                             : static_cast<typename F::Storage>(F::kZeroCode);
      }
    }
  } else {
    for (int i = lane; i < n; i += kLanes) out[i] = Device<F>::encode(x[i], tables);
  }
}

struct AnyWarp {
  Job job;
  float g[kTile], p[kTile], s[kMostSlots][kTile];
  Random8 random[kTile / 8 + 1];
};
struct AnyShared {
  TablesOf<StateFormats> tables;
  AnyWarp warp[kAnyWarps];
};

template <class U>
__device__ __forceinline__ void update_leaf(AnyWarp& w, int n, int lane) {
  const typename U::Coef coef = *reinterpret_cast<const typename U::Coef*>(w.job.coef);
  for (int i = lane; i < n; i += kLanes) {
    float s[U::kSlots];
    for (int k = 0; k < U::kSlots; ++k) s[k] = w.s[k][i];
    float p = w.p[i];
    U::update(w.g[i], p, s, coef);
    w.p[i] = p;
    for (int k = 0; k < U::kSlots; ++k) w.s[k][i] = s[k];
  }
}

/// The values of a slot from (row, col) on.
struct SlotAt {
  void* values;
  float* scales;
};
__device__ __forceinline__ SlotAt slot_at(const StateSlot& slot, int64_t cols, int64_t row,
                                          int64_t col) {
  SlotAt at{nullptr, nullptr};
  visit(slot.format, StateFormats{}, [&](auto format) {
    constexpr int kBits = decltype(format)::kBits;
    at.values =
        static_cast<char*>(slot.values) + row * code_bytes(cols, kBits) + code_bytes(col, kBits);
  });
  if (slot.scales != nullptr) at.scales = slot.scales + block_at(slot, cols, row, col);
  return at;
}

__global__ void __launch_bounds__(kAnyWarps* kLanes) step_any(const Batch batch) {
  LB_SHARED(AnyShared, shared);
  if (batch.found_inf != nullptr && *batch.found_inf != 0.0f) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  fill_tables(shared.tables, StateFormats{}, thread, kAnyWarps * kLanes);
  __syncthreads();
  AnyWarp& w = shared.warp[thread / kLanes];
  const Job& job = w.job;
  Place place;
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kAnyWarps + thread / kLanes;
       tile < batch.tiles; tile += static_cast<int64_t>(gridDim.x) * kAnyWarps) {
    stage_job(batch, tile, lane, w.job, place);
    const int64_t tiles_per_row = ceil_div(job.cols, kTile);
    const int64_t row = divide(tile - place.begin, tiles_per_row);
    const int64_t col = (tile - place.begin - row * tiles_per_row) * kTile;
    const int n = static_cast<int>(job.cols - col < kTile ? job.cols - col : kTile);
    const int64_t at = row * job.cols + col;
    int slots = 0;
    visit(job.rule, UpdateRules{}, [&](auto rule) { slots = decltype(rule)::kSlots; });

    visit(job.grad_format, GradFormats{}, [&](auto format) {
      using G = decltype(format);
      load_leaf<G>(static_cast<const typename G::Storage*>(job.grad) + at, w.g, n, lane);
    });
    visit(job.param_format, ParamFormats{}, [&](auto format) {
      using P = decltype(format);
      load_leaf<P>(static_cast<const typename P::Storage*>(job.param) + at, w.p, n, lane);
    });
    for (int k = 0; k < slots; ++k) {
      const SlotAt slot = slot_at(job.state[k], job.cols, row, col);
      visit(job.state[k].format, StateFormats{}, [&](auto format) {
        decode_leaf<decltype(format)>(slot.values, slot.scales, job.state[k].block, w.s[k], n, lane,
                                      shared.tables);
      });
    }
    visit(job.rule, UpdateRules{}, [&](auto rule) { update_leaf<decltype(rule)>(w, n, lane); });
    for (int k = 0; k < slots; ++k) {
      const SlotAt slot = slot_at(job.state[k], job.cols, row, col);
      visit(job.state[k].format, StateFormats{}, [&](auto format) {
        encode_leaf<decltype(format)>(w.s[k], slot.values, slot.scales, job.state[k].block, n, lane,
                                      shared.tables);
      });
    }
    if (!job.write_param) continue;
    const uint64_t index = static_cast<uint64_t>(job.first + row * job.global_cols + col);
    const int skip = static_cast<int>(index & 7);
    visit(job.param_format, ParamFormats{}, [&](auto format) {
      using P = decltype(format);
      auto* param = static_cast<typename P::Storage*>(job.param) + at;
      if constexpr (P::kRandom) {
        __syncwarp();  // no lane still reads the bits before
        for (int i = lane; i < (skip + n + 7) / 8; i += kLanes)
          w.random[i] = random8(job.random, (index >> 3) + i);
        __syncwarp();
      }
      for (int i = lane; i < n; i += kLanes) {
        const int e = skip + i;
        param[i] = P::store(w.p[i], P::kRandom ? w.random[e >> 3].bits16(e & 7) : 0);
      }
    });
  }
}

}  // namespace lowbit::cuda
