// The update on a GPU, with the bits of cpu/step.cpp: one warp per unit of neighboring tiles, and
// the units of all jobs of a kernel in one launch.
//
// step_fast: formats fixed at compile time, 8 neighboring values per lane in registers. It requires
// rows that start on a multiple of 8 values (cuda/step/step.cu decides), so the 8 values of a lane
// are all present or all absent, aligned, and in one Philox group.
//
// step_any: every combination (tile.cuh).
#pragma once

#include "cuda/step/fixed.cuh"
#include "cuda/step/prepare.cuh"
#include "cuda/step/tile.cuh"

namespace lowbit::cuda {

constexpr int kFastWarps = 8;
// Resident blocks of threads per multiprocessor: 24 warps have enough loads under way.
constexpr int kFastBlocks = 3;

// ---- fixed formats ----

/// The tables of state formats, once for all slots of one format. Members, not bases: nvcc compares
/// the address of an object with null where a base does not begin with it, and no longer knows that
/// the tables are in shared memory.
template <bool kSame, class F>
struct TablesOnce {
  typename Fixed<F>::Tables tables;
  __device__ __forceinline__ void fill(int thread, int threads) {
    Fixed<F>::fill(tables, thread, threads);
  }
};
template <class F>
struct TablesOnce<true, F> {
  __device__ __forceinline__ void fill(int, int) {}
};
template <class Before, class... S>
struct StateTables {
  __device__ __forceinline__ void fill(int, int) {}
};
template <class... Before, class F, class... S>
struct StateTables<Types<Before...>, F, S...> {
  TablesOnce<(__is_same(F, Before) || ...), F> own;
  StateTables<Types<Before..., F>, S...> others;
  __device__ __forceinline__ void fill(int thread, int threads) {
    own.fill(thread, threads);
    others.fill(thread, threads);
  }
  template <class Wanted>
  __device__ __forceinline__ const typename Fixed<Wanted>::Tables& get() const {
    if constexpr (__is_same(F, Wanted)) {
      return own.tables;
    } else {
      return others.template get<Wanted>();
    }
  }
};

/// Whether a warp holds its scales: the registers of a rule of three states are all in use.
template <class U>
constexpr bool kHolds = U::kSlots <= 2;

/// The job of a warp, and the scales of its last tiles: that of block b is held at b % 32. A scale
/// alone is a fraction of a sector of 32 bytes, and a step that wrote one by one took a tenth
/// longer (docs/bench-gpu.md).
///
/// kStored: the most numbers that a format stores of a scale.
template <class U, int kStored>
struct FastWarp : FastJob<U> {
  float held[FastJob<U>::kStates][kStored * kLanes];
};

template <class F>
LB_HD constexpr int stored_of() {
  if constexpr (F::kScaled) {
    return F::Scale::kStored;
  } else {
    return 1;
  }
}
template <class... S>
LB_HD constexpr int most_stored() {
  int most = 1;
  ((most = stored_of<S>() > most ? stored_of<S>() : most), ...);
  return most;
}

template <class U, class... S>
struct FastShared {
  StateTables<Types<>, S...> tables;
  FastWarp<U, most_stored<S...>()> warp[kFastWarps];
};

/// The 8 values of a lane.
struct Eight {
  uint32_t at;        // index among the job's groups of 8
  uint32_t block[3];  // indices of its scales
  uint64_t group;     // its random bits
  uint32_t left;      // groups from the tile's first to the end of the row, or of the rows
};

template <class U>
__device__ __forceinline__ Eight eight_of(const FastJob<U>& w, uint32_t tile, int lane) {
  Eight e;
  if (w.flat) {
    e.at = tile * kLanes + static_cast<uint32_t>(lane);
    for (int k = 0; k < U::kSlots; ++k) e.block[k] = e.at >> w.shift[k];
    e.group = w.first + e.at;
    e.left = w.here - tile * kLanes;
    return e;
  }
  const uint32_t row = tile / w.tiles_per_row;
  const uint32_t begin = (tile - row * w.tiles_per_row) * kLanes;
  const uint32_t col = begin + static_cast<uint32_t>(lane);
  e.left = w.cols - begin;
  e.at = row * w.cols + col;
  for (int k = 0; k < U::kSlots; ++k) e.block[k] = row * w.blocks_per_row[k] + (col >> w.shift[k]);
  e.group = w.first + row * w.global_cols + col;
  return e;
}

/// core's random8, with the keys of all rounds at hand.
template <class U>
__device__ __forceinline__ Random8 random_of(const FastJob<U>& w, uint64_t group) {
  uint32_t x0 = static_cast<uint32_t>(group), x1 = static_cast<uint32_t>(group >> 32);
  uint32_t x2 = w.stream, x3 = w.seed_high;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = static_cast<uint64_t>(kPhiloxM0) * x0;
    const uint64_t b = static_cast<uint64_t>(kPhiloxM1) * x2;
    x0 = static_cast<uint32_t>(b >> 32) ^ x1 ^ w.key[2 * round];
    x1 = static_cast<uint32_t>(b);
    x2 = static_cast<uint32_t>(a >> 32) ^ x3 ^ w.key[2 * round + 1];
    x3 = static_cast<uint32_t>(a);
  }
  return {{x0, x1, x2, x3}};
}

template <class F>
__device__ __forceinline__ char* state_at(char* values, uint32_t at) {
  return values + static_cast<uint64_t>(at) * F::kBits;
}
template <class F>
__device__ __forceinline__ auto* scale_at(char* scales, uint32_t block) {
  return reinterpret_cast<typename F::Scale::Stored*>(scales) +
         static_cast<uint64_t>(block) * F::Scale::kStored;
}

/// Where the scale of a block is held, among those of a slot.
template <class F>
__device__ __forceinline__ uint32_t held_at(uint32_t block) {
  return block % kLanes * F::Scale::kStored;
}
/// Writes a scale that was held.
template <class F>
__device__ __forceinline__ void write_scale(const float* held, typename F::Scale::Stored* to) {
  for (int i = 0; i < F::Scale::kStored; ++i) {
    if constexpr (sizeof *to == sizeof *held) {
      to[i] = held[i];
    } else {
      to[i] = half_nearest(held[i]);
    }
  }
}

template <class F>
__device__ __forceinline__ void dequantize8(char* values, char* scales, uint32_t at, uint32_t block,
                                            const typename Fixed<F>::Tables& tables,
                                            float (&out)[kEach]) {
  const auto pack = StatePack<F>::load(state_at<F>(values, at));
  if constexpr (F::kScaled) {
    const auto scale = F::Scale::read(scale_at<F>(scales, block));
    float z[kEach];
    Fixed<F>::dequantize(pack, tables, z);
    for (int e = 0; e < kEach; ++e) out[e] = scale.from_z(z[e]);
  } else {
    Fixed<F>::dequantize(pack, tables, out);
  }
}

/// Stores the codes of values that are here, and the scale of the block if the lane is its first.
template <class F>
__device__ __forceinline__ void quantize8(const typename Fixed<F>::Encoder& encoder,
                                          const float (&x)[kEach], char* values, float* scale,
                                          uint32_t at, int lane, int lanes,
                                          const typename Fixed<F>::Tables& tables) {
  if constexpr (F::kScaled) {
    if ((lane & (lanes - 1)) == 0) encoder.write(scale);
  }
  StatePack<F> pack;
  encoder.quantize(x, tables, pack);
  pack.store(state_at<F>(values, at));
}

/// Bit k: whether slot k has scales, and whether these depend on the smallest magnitude.
template <class... S>
LB_HD constexpr uint32_t scaled_slots() {
  uint32_t bits = 0, bit = 1;
  ((bits |= S::kScaled ? bit : 0, bit <<= 1), ...);
  return bits;
}
template <class F>
LB_HD constexpr bool needs_min() {
  if constexpr (F::kScaled) {
    return F::Scale::kNeedsMin;
  } else {
    return false;
  }
}
template <class... S>
LB_HD constexpr uint32_t slots_with_min() {
  uint32_t bits = 0, bit = 1;
  ((bits |= needs_min<S>() ? bit : 0, bit <<= 1), ...);
  return bits;
}

/// Of the smallest magnitudes of a lane's states that are not 0, complements: the largest of a
/// block's is that of its smallest magnitude, and 0 where there is none.
template <class U>
__device__ __forceinline__ void complements(const Eights<U>& s, Mosts<U>& least) {
  for (int k = 0; k < U::kSlots; ++k) {
    for (int e = 0; e < kEach; ++e) {
      const uint32_t magnitude = magnitude_bits(s[k][e]);
      const uint32_t complement = magnitude == 0 ? 0 : ~magnitude;
      least[k] = complement > least[k] ? complement : least[k];
    }
  }
}

// One slot after another.

template <int kSlot = 0, class U, class Tables>
__device__ __forceinline__ void load_states(Types<>, const FastJob<U>&, const Eight&, const Tables&,
                                            Eights<U>&) {}
template <int kSlot = 0, class F, class... S, class U, class Tables>
__device__ __forceinline__ void load_states(Types<F, S...>, const FastJob<U>& w, const Eight& eight,
                                            const Tables& tables, Eights<U>& s) {
  dequantize8<F>(w.state[kSlot].values, w.state[kSlot].scales, eight.at, eight.block[kSlot],
                 tables.template get<F>(), s[kSlot]);
  load_states<kSlot + 1>(Types<S...>{}, w, eight, tables, s);
}

/// The largest magnitudes of states without a sign that have negative values, which is rare.
template <int kSlot, class U>
__device__ __forceinline__ void correct_maxima(const Eights<U>& s, Mosts<U>& most) {
  if constexpr (kSlot < U::kSlots) {
    constexpr bool kSigned = U::kSlot[kSlot].is_signed;
    if (!kSigned && most[kSlot] >> 31) {
      most[kSlot] = 0;
      for (int e = 0; e < kEach; ++e) {
        const uint32_t magnitude = magnitude_bits(s[kSlot][e]);
        most[kSlot] = magnitude > most[kSlot] ? magnitude : most[kSlot];
      }
    }
    correct_maxima<kSlot + 1, U>(s, most);
  }
}

template <class F>
__device__ __forceinline__ auto encoder_of(uint32_t most, uint32_t least) {
  if constexpr (needs_min<F>()) {
    return typename Fixed<F>::Encoder(most, ~least);
  } else {
    return typename Fixed<F>::Encoder(most);
  }
}

template <int kSlot = 0, class U, int kStored, class Tables>
__device__ __forceinline__ void store_states(Types<>, FastWarp<U, kStored>&, const Eight&,
                                             const Tables&, const Eights<U>&, const Mosts<U>&,
                                             const Mosts<U>&, int) {}
template <int kSlot = 0, class F, class... S, class U, int kStored, class Tables>
__device__ __forceinline__ void store_states(Types<F, S...>, FastWarp<U, kStored>& w,
                                             const Eight& eight, const Tables& tables,
                                             const Eights<U>& s, const Mosts<U>& most,
                                             const Mosts<U>& least, int lane) {
  if constexpr (is_drawn<U, F>(kSlot)) {
    const uint64_t group = eight.group | static_cast<uint64_t>(kSlot + 1) << 56;
    store_slow<F>(s[kSlot], most[kSlot], random_of(w, group),
                  state_at<F>(w.state[kSlot].values, eight.at));
  } else {
    float* scale = nullptr;
    if constexpr (F::kScaled && kHolds<U>) {
      scale = &w.held[kSlot][held_at<F>(eight.block[kSlot])];
    } else if constexpr (F::kScaled) {
      scale = scale_at<F>(w.state[kSlot].scales, eight.block[kSlot]);
    }
    quantize8<F>(encoder_of<F>(most[kSlot], least[kSlot]), s[kSlot], w.state[kSlot].values, scale,
                 eight.at, lane, w.lanes[kSlot], tables.template get<F>());
  }
  store_states<kSlot + 1>(Types<S...>{}, w, eight, tables, s, most, least, lane);
}

/// Writes the scales that are held, those of a span of tiles that ends with `eight`'s: neighbors,
/// by one lane each. `before` is the number of lanes of the tiles before it.
template <int kSlot = 0, class U, int kStored>
__device__ __forceinline__ void write_scales(Types<>, const FastWarp<U, kStored>&, const Eight&,
                                             uint32_t, uint32_t) {}
template <int kSlot = 0, class F, class... S, class U, int kStored>
__device__ __forceinline__ void write_scales(Types<F, S...>, const FastWarp<U, kStored>& w,
                                             const Eight& eight, uint32_t before, uint32_t lane) {
  if constexpr (F::kScaled) {
    const int shift = w.shift[kSlot];
    const uint32_t block = eight.block[kSlot] - (lane >> shift) - (before >> shift) + lane;
    if (lane << shift < before + eight.left && lane < (before + kLanes) >> shift)
      write_scale<F>(&w.held[kSlot][held_at<F>(block)], scale_at<F>(w.state[kSlot].scales, block));
  }
  write_scales<kSlot + 1>(Types<S...>{}, w, eight, before, lane);
}

/// Updates the values of a tile, 8 by a lane. Writes the scales that are held if it is the last of
/// a unit or of as many tiles as the job's span.
template <class P, class G, class U, int kStored, class... S>
__device__ __forceinline__ void update_tile(FastWarp<U, kStored>& w, uint32_t tile, bool is_last,
                                            uint32_t group, int lane,
                                            const StateTables<Types<>, S...>& tables) {
  const Eight eight = eight_of(w, tile, lane);
  const uint64_t at = static_cast<uint64_t>(eight.at) * kEach;
  Eights<U> s;
  Mosts<U> most{}, least{};
  const bool is_here = static_cast<uint32_t>(lane) < eight.left;
  if (is_here) {
    const auto grad =
        Pack8<typename G::Storage>::load(static_cast<const typename G::Storage*>(w.grad) + at);
    auto param =
        Pack8<typename P::Storage>::load(static_cast<const typename P::Storage*>(w.param) + at);
    CompensationPack<P> compensation;
    if constexpr (kHasCompensation<P>)
      compensation.read(static_cast<const typename P::Compensation*>(w.compensation) + at);
    Factors<U> factors{};
    if constexpr (factors_of<U>() > 0) w.factors(eight.at, factors);
    load_states(Types<S...>{}, w, eight, tables, s);
    Random8 random{};
    if constexpr (P::kRandom) random = random_of(w, eight.group);
    float p[kEach], g[kEach];
    if constexpr (IsSplit<P>) {
      load_split<P>(param, compensation, p);
    } else {
      for (int e = 0; e < kEach; ++e) {
        typename P::Compensation c{};
        if constexpr (kHasCompensation<P>) c = compensation.get(e);
        p[e] = P::load(param.get(e), c);
      }
    }
    for (int e = 0; e < kEach; ++e) g[e] = G::load(grad.get(e));
    w.step.template update<P>(g, p, s, factors, most, random, param, compensation);
    if (w.write_param) {
      param.store(static_cast<typename P::Storage*>(w.param) + at);
      if constexpr (kHasCompensation<P>)
        compensation.store(static_cast<typename P::Compensation*>(w.compensation) + at);
    }
    correct_maxima<0, U>(s, most);
    if constexpr ((needs_min<S>() || ...)) complements<U>(s, least);
  }
  if constexpr ((S::kScaled || ...)) {
    __syncwarp();  // memory order: no lane still reads a scale that the first of its block writes
    block_absmax<scaled_slots<S...>()>(most, w.lanes);
    if constexpr ((needs_min<S>() || ...)) block_absmax<slots_with_min<S...>()>(least, w.lanes);
  }
  if (is_here) store_states(Types<S...>{}, w, eight, tables, s, most, least, lane);
  if constexpr ((S::kScaled || ...) && kHolds<U>) {
    const uint32_t span = w.span & (group - 1);
    if ((tile & span) != span && !is_last) return;
    __syncwarp();  // every scale is held
    write_scales(Types<S...>{}, w, eight, (tile & span) * kLanes, static_cast<uint32_t>(lane));
  }
}

/// Whether a kernel fetches tiles ahead: where an H100 gained by it (docs/bench-gpu.md).
template <class P, class G, class... S>
constexpr bool kFetches = sizeof(typename P::Storage) == 2 && sizeof(typename G::Storage) == 2 &&
                          sizeof...(S) == 2 && ((S::kBits == 8) && ...);

/// Brings the bytes of a tile to the second cache while the warp computes the one before: four
/// lanes, one range each.
template <class U>
__device__ __forceinline__ void fetch_tile(const FastJob<U>& w, uint32_t tile, int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (!w.fetches || (tile + 1) * kLanes > w.here || lane >= 4) return;
  const auto* from = static_cast<const char*>(lane == 0 ? w.grad : w.param);
  if (lane >= 2) from = lane == 2 ? w.state[0].values : w.state[1].values;
  const uint32_t bytes = lane < 2 ? 2 * kTile : kTile;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                   from + static_cast<uint64_t>(tile) * bytes),
               "r"(bytes)
               : "memory");
#endif
}

/// Rule, parameter format, gradient format, and one state format for each slot of the rule.
template <class U, class P, class G, class... S>
__global__ void __launch_bounds__(kFastWarps* kLanes, kFastBlocks) step_fast(const Units batch) {
  static_assert(U::kSlots == sizeof...(S));
  using Shared = FastShared<U, S...>;
  LB_SHARED(Shared, shared);
  if (batch.found_inf != nullptr && *batch.found_inf != 0.0f) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes, warp = thread / kLanes;
  shared.tables.fill(thread, kFastWarps * kLanes);
  __syncthreads();
  auto& w = shared.warp[warp];
  const auto stride = static_cast<uint32_t>(warps<kFastWarps>());
  auto unit = static_cast<uint32_t>(warp_number<kFastWarps>(thread));
  uint32_t staged = ~0u, next = unit < batch.units ? batch.job_of[unit] : 0;
  LB_UNROLL(1)
  for (; unit < batch.units; unit += stride) {
    const uint32_t job = next;
    if (unit + stride < batch.units) next = batch.job_of[unit + stride];  // arrives meanwhile
    if (job != staged) {
      __syncwarp();  // no lane still reads the previous job
      copy_words(&w, static_cast<const char*>(batch.fast) + static_cast<size_t>(job) * kFastBytes,
                 sizeof(FastJob<U>), lane);
      __syncwarp();
      staged = job;
    }
    uint32_t tile = (unit - w.first_unit) * batch.group;
    const uint32_t end = tile + batch.group < w.tiles ? tile + batch.group : w.tiles;
    LB_UNROLL(1)
    for (; tile < end; ++tile) {
      if constexpr (kFetches<P, G, S...>) {
        if (tile + 1 < end) fetch_tile(w, tile + 1, lane);
      }
      update_tile<P, G>(w, tile, tile + 1 == end, batch.group, lane, shared.tables);
    }
  }
}

// ---- any formats ----

/// Updates a tile, chunk by chunk. Blocks of several chunks are measured first.
__device__ __forceinline__ void update_any(AnyWarp& w, const TileAt& tile, int lane,
                                           const TablesOf<StateFormats>& tables) {
  const Job& job = w.job;
  const int slots = slots_of(job.rule);
  const bool twice = job.tile > kTile;
  if (twice) forget_blocks(w, lane);
  LB_UNROLL(1)
  for (int pass = twice ? 0 : 1; pass < 2; ++pass) {
    LB_UNROLL(1)
    for (int64_t col = tile.col; col < tile.end; col += kTile) {
      const Chunk at = chunk_at(job, tile, col);
      const int first = static_cast<int>(col - tile.col);
      load_chunk(w, at, slots, lane, tables);
      update_chunk(w, at, lane);
      LB_UNROLL(1)
      for (int k = 0; k < slots; ++k) {
        if (pass == 1) {
          quantize_slot(w, k, at, first, lane, tables);
        } else if (is_long(job.state[k])) {
          measure_blocks(w, k, at, first, lane);
        }
      }
      if (pass == 1 && job.write_param) store_param(w, at, lane);
    }
  }
}

__global__ void __launch_bounds__(kAnyWarps* kLanes, kAnyBlocks) step_any(const Units batch) {
  LB_SHARED(AnyShared, shared);
  if (batch.found_inf != nullptr && *batch.found_inf != 0.0f) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  fill_tables(shared.tables, StateFormats{}, thread, kAnyWarps * kLanes);
  __syncthreads();
  AnyWarp& w = shared.warp[thread / kLanes];
  uint32_t staged = ~0u;
  LB_UNROLL(1)
  for (auto unit = static_cast<uint32_t>(warp_number<kAnyWarps>(thread)); unit < batch.units;
       unit += static_cast<uint32_t>(warps<kAnyWarps>())) {
    const uint32_t i = batch.job_of[unit];
    if (i != staged) {
      __syncwarp();  // no lane still reads the previous job
      copy_words(&w.job, batch.jobs + i, sizeof(Job), lane);
      __syncwarp();
      staged = i;
    }
    const int64_t all = w.job.tiles();
    const auto first = static_cast<int64_t>(unit - batch.first_unit[i]) * batch.group;
    const int64_t end = first + batch.group < all ? first + batch.group : all;
    LB_UNROLL(1)
    for (int64_t t = first; t < end; ++t) {
      const TileAt tile = tile_at(w.job, t);
      if (is_here(w.job, tile)) update_any(w, tile, lane, shared.tables);
    }
  }
}

}  // namespace lowbit::cuda
