// What a warp of a fixed kernel keeps of its job. `prepare` makes it once a step, so that a warp
// only copies it.
#pragma once

#include "cuda/step/batch.cuh"
#include "cuda/step/rules.cuh"

namespace lowbit::cuda {

constexpr int kFastBytes = 384;   // of a FastJob in the table
constexpr uint32_t kMaxSpan = 8;  // tiles: 8 scales are a sector of memory

/// Whether the rows of a job follow one another, here and in the whole parameter, and fill tiles:
/// rows of whole tiles, or short rows, several of them in a tile.
LB_HD bool is_flat(const Job& job) {
  const bool divides_tile = job.cols < kTile && (job.cols & (job.cols - 1)) == 0;
  return job.cols == job.global_cols && (job.cols % kTile == 0 || divides_tile);
}
/// The tiles of a job of a fixed kernel, for the host.
inline int64_t fast_tiles(const Job& job) {
  return is_flat(job) ? ceil_div(job.rows * job.cols, kTile) : job.tiles();
}

/// The factored moments of a rule.
template <int kFactors>
struct FastFactors {
  const float *row[kFactors], *col[kFactors];
  uint32_t inner_cols, inner_rows;  // columns in groups of 8
  bool one_matrix;                  // or several, one after another

  __device__ __forceinline__ void set_factors(const Job& job) {
    LB_UNROLL(1)
    for (int k = 0; k < kFactors; ++k) row[k] = job.factor[k].scaled, col[k] = job.factor[k].col;
    inner_cols = static_cast<uint32_t>(job.inner_cols / kEach);
    inner_rows = static_cast<uint32_t>(job.inner_rows);
    one_matrix = job.batches == 1;
  }
  /// Of the group `at` of the job.
  __device__ __forceinline__ void factors(uint32_t at, Factors8 (&f)[kFactors]) const {
    const uint32_t r = at / inner_cols;
    uint32_t c = at - r * inner_cols;
    if (!one_matrix) c += r / inner_rows * inner_cols;
    for (int k = 0; k < kFactors; ++k) {
      f[k].row = row[k][r];
      const auto pack = Pack8<float>::load(col[k] + static_cast<uint64_t>(c) * kEach);
      for (int e = 0; e < kEach; ++e) f[k].col[e] = pack.get(e);
    }
  }
};
template <>
struct FastFactors<0> {
  __device__ __forceinline__ void set_factors(const Job&) {}
};

template <class U>
struct alignas(16) FastJob : FastFactors<factors_of<U>()> {
  static constexpr int kStates = U::kSlots > 0 ? U::kSlots : 1;
  struct State {
    char *values, *scales;
  };
  // In the order of use, so that one access reads 16 bytes of them.
  const void* grad;
  void *param, *compensation;
  uint64_t first;  // in groups of 8 values, as all below
  State state[kStates];
  uint32_t stream, seed_high, key[2 * kPhiloxRounds];  // of the rounds
  FastStep<U> step;
  int shift[kStates], lanes[kStates];  // log2 of the block, and the block
  bool flat;                           // is_flat
  bool fetches;                        // flat, and both states begin on 16 bytes
  bool write_param;
  uint32_t here;  // groups, where flat
  uint32_t cols, tiles_per_row, blocks_per_row[kStates];
  uint64_t global_cols;
  uint32_t tiles, first_unit;
  uint32_t
      span;  // how many tiles' scales are held at most, less one: they are 32 of a state or less

  /// Loops are not unrolled, since `prepare` has few registers left.
  __device__ __forceinline__ void set(const Job& job, const typename U::Coef& coef,
                                      uint32_t first_of_units) {
    grad = job.grad, param = job.param, compensation = job.compensation;
    write_param = job.write_param;
    flat = is_flat(job);
    stream = job.random.stream, seed_high = job.random.seed_high;
    step.set(coef);
    LB_UNROLL(1)
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const auto r = static_cast<uint32_t>(round);
      key[2 * round] = job.random.seed_low + r * kPhiloxW0;
      key[2 * round + 1] = job.random.step + r * kPhiloxW1;
    }
    first = static_cast<uint64_t>(job.first) / kEach;
    global_cols = static_cast<uint64_t>(job.global_cols) / kEach;
    cols = static_cast<uint32_t>(job.cols / kEach);
    tiles_per_row = (cols + kLanes - 1) / kLanes;
    span = flat ? kMaxSpan - 1 : 0;
    LB_UNROLL(1)
    for (int k = 0; k < U::kSlots; ++k) {
      state[k] = {static_cast<char*>(job.state[k].values), static_cast<char*>(job.state[k].scales)};
      lanes[k] = job.state[k].block / kEach;
      // The blocks of short rows are rows.
      if (flat && lanes[k] > static_cast<int>(cols)) lanes[k] = static_cast<int>(cols);
      shift[k] = lanes[k] > 0 ? __ffs(lanes[k]) - 1 : 0;
      if (lanes[k] > 0) span &= (1u << shift[k]) - 1;
      blocks_per_row[k] = (cols + (1u << shift[k]) - 1) >> shift[k];
    }
    if constexpr (U::kSlots == 2) {
      const auto bits = reinterpret_cast<uintptr_t>(state[0].values) |
                        reinterpret_cast<uintptr_t>(state[1].values);
      fetches = flat && bits % 16 == 0;
    }
    this->set_factors(job);
    here = static_cast<uint32_t>(job.rows) * cols;
    tiles = flat ? (here + kLanes - 1) / kLanes : static_cast<uint32_t>(job.rows) * tiles_per_row;
    first_unit = first_of_units;
  }
};

}  // namespace lowbit::cuda
