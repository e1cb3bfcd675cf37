// Warp primitives: finding work and agreeing on a number.
#pragma once

#include "core/layout.h"
#include "cuda/format.cuh"

namespace lowbit::cuda {

// One object per block of threads.
#ifndef LB_SHARED
#define LB_SHARED(Type, name) __shared__ Type name
#endif

// A large kernel argument that threads only read.
#ifndef LB_ARGUMENT
#define LB_ARGUMENT(Type) const __grid_constant__ Type
#endif

/// The unit in which structs are copied.
using Word = uint64_t __attribute__((__may_alias__));

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

/// The index of a thread's warp among all warps, in blocks of kWarps, and the number of warps.
/// Units of work are dealt to warps in turn.
template <int kWarps>
__device__ __forceinline__ int64_t warp_number(int thread) {
  return static_cast<int64_t>(blockIdx.x) * kWarps + thread / kLanes;
}
template <int kWarps>
__device__ __forceinline__ int64_t warps() {
  return static_cast<int64_t>(gridDim.x) * kWarps;
}

/// The first job whose end (`ends`, `count` of them) lies beyond the tile, found by all lanes of a
/// warp: each iteration divides the range into 32 parts.
template <class Jobs>
__device__ __forceinline__ int64_t find_job(const Jobs& batch, int64_t tile, int lane) {
  int64_t low = 0, length = batch.count;
  while (length > 1) {
    const int64_t part = ceil_div(length, kLanes);
    const int64_t last = (lane + 1) * part < length ? (lane + 1) * part : length;
    const bool before = batch.ends[low + last - 1] <= tile;
    const int64_t skip = __popc(__ballot_sync(kAllLanes, before)) * part;
    low += skip;
    length = length - skip < part ? length - skip : part;
  }
  return low;
}

/// a / b for a >= 0, b > 0. 64-bit division is many times slower and almost never needed.
__device__ __forceinline__ int64_t divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

/// The largest value of `lanes` neighboring lanes, a power of two.
__device__ __forceinline__ uint32_t largest(uint32_t mine, int lanes) {
  for (int span = 1; span < lanes; span <<= 1) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, mine, span);
    mine = other > mine ? other : mine;
  }
  return mine;
}

/// The same of several numbers with blocks of `lanes` lanes, mostly whole warps. Bit k of kScaled:
/// whether number k has blocks; the others stay as they are.
template <uint32_t kScaled, int kMany>
__device__ __forceinline__ void block_absmax(uint32_t (&mine)[kMany], const int (&lanes)[kMany]) {
  bool whole = true;
  for (int k = 0; k < kMany; ++k) whole = whole && ((kScaled >> k & 1) == 0 || lanes[k] == kLanes);
  if (whole) {
    for (int k = 0; k < kMany; ++k)
      if (kScaled >> k & 1) mine[k] = __reduce_max_sync(kAllLanes, mine[k]);
  } else {
    for (int k = 0; k < kMany; ++k)
      if (kScaled >> k & 1) mine[k] = largest(mine[k], lanes[k]);
  }
}

}  // namespace lowbit::cuda
