// What a warp of a fixed kernel keeps of its job. `prepare` makes it once a step, so that a warp
// only copies it.
#pragma once

#include "cuda/adam.cuh"
#include "cuda/batch.cuh"

namespace lowbit::cuda {

/// Whether a rule has fixed kernels.
template <class U>
concept HasFast = __is_same(U, AdamW);

/// What the update of 8 values takes of a rule's coefficients.
template <class U>
struct FastStep;
template <>
struct FastStep<AdamW> : AdamStep<AdamW> {};

constexpr int kFastBytes = 320;  // of a FastJob in the table

template <class U>
struct alignas(16) FastJob {
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
  bool flat;  // rows are whole tiles and follow one another here and in the whole parameter
  bool write_param;
  uint32_t cols, tiles_per_row, blocks_per_row[kStates];
  uint64_t global_cols;
  uint32_t tiles, first_unit;

  __device__ __forceinline__ void set(const Job& job, const typename U::Coef& coef,
                                      uint32_t first_of_units) {
    grad = job.grad, param = job.param, compensation = job.compensation;
    write_param = job.write_param;
    stream = job.random.stream, seed_high = job.random.seed_high;
    step.set(coef);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const auto r = static_cast<uint32_t>(round);
      key[2 * round] = job.random.seed_low + r * kPhiloxW0;
      key[2 * round + 1] = job.random.step + r * kPhiloxW1;
    }
    first = static_cast<uint64_t>(job.first) / kEach;
    global_cols = static_cast<uint64_t>(job.global_cols) / kEach;
    cols = static_cast<uint32_t>(job.cols / kEach);
    tiles_per_row = (cols + kLanes - 1) / kLanes;
    for (int k = 0; k < U::kSlots; ++k) {
      state[k] = {static_cast<char*>(job.state[k].values),
                  static_cast<char*>(job.state[k].scales)};
      lanes[k] = job.state[k].block / kEach;
      shift[k] = lanes[k] > 0 ? __ffs(lanes[k]) - 1 : 0;
      blocks_per_row[k] = (cols + (1u << shift[k]) - 1) >> shift[k];
    }
    flat = job.cols % kTile == 0 && job.cols == job.global_cols;
    tiles = static_cast<uint32_t>(job.rows) * tiles_per_row;
    first_unit = first_of_units;
  }
};

}  // namespace lowbit::cuda
