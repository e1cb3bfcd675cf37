// Exact sums (core/exact_sum.h) of the terms that a warp meets.
#pragma once

#include "cuda/sums.cuh"

namespace lowbit::cuda {

/// The terms that a warp sums before it adds to words in global memory, in shared memory.
struct WarpSum {
  float x[kTile];
  int64_t words[ExactSum::kWords];

  __device__ __forceinline__ void clear(int lane) {
    if (lane < ExactSum::kWords) words[lane] = 0;
    __syncwarp();  // memory order: additions follow a shuffle
  }
  /// Adds the first n values of x; lane i wrote those with index i mod 32.
  __device__ __forceinline__ void add(int n, int lane) { add_values(x, 0, n, words, lane); }
  __device__ __forceinline__ void flush(int64_t* to, int lane) {
    __syncwarp();  // memory order: carrying is not an atomic addition
    if (lane == 0) exact_carry(words);
    __syncwarp();
    if (lane < ExactSum::kWords) add_word(to + lane, words[lane]);
    clear(lane);
  }
};

}  // namespace lowbit::cuda
