// Exact sums (core/exact_sum.h) on a GPU.
//
// A warp adds a run of values as follows. Within the 31 exponents below the largest one of the run,
// every value is an integer of at most 54 bits in one unit, so the sum of 256 of them is exact in
// 64 bits. Each lane adds its values, shuffles add the lanes, and four lanes add 16 bits each to
// the words. Values smaller than 2^-31 of the largest are added one by one.
#pragma once

#include "core/exact_sum.h"
#include "cuda/warp.cuh"

namespace lowbit::cuda {

__device__ __forceinline__ void add_word(int64_t* word, int64_t x) {
  if (x != 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(x));
}

/// The position of a finite value's mantissa, and the mantissa with the sign (exact_sum.h).
struct Term {
  int position;
  int64_t mantissa;
};
__device__ __forceinline__ Term term_of(float x) {
  const uint32_t bits = float_bits(x), exponent = bits >> 23 & 0xffu;
  const int64_t m = static_cast<int64_t>((bits & 0x7fffffu) | (exponent ? 0x800000u : 0u));
  return {static_cast<int>(exponent ? exponent - 1 : 0), bits >> 31 ? -m : m};
}

/// Adds one value, by one lane.
__device__ __forceinline__ void add_value(float x, int64_t* words) {
  if (magnitude_bits(x) >= kInfinityBits) {
    add_word(words + ExactSum::kNonFinite, 1);
    return;
  }
  const Term t = term_of(x);
  add_word(words + (t.position >> 4), t.mantissa << (t.position & 15));
}

/// Adds the k-th of the four pieces of a sum of units at position `base`.
__device__ __forceinline__ void add_piece(int64_t sum, int k, int base, int64_t* words) {
  const int64_t piece = k < 3 ? (sum >> (16 * k)) & 0xffff : sum >> 48;
  add_word(words + (base >> 4) + k, piece << (base & 15));
}

/// The sum of all lanes' numbers.
__device__ __forceinline__ int64_t all_lanes(int64_t sum) {
  for (int span = 1; span < kLanes; span <<= 1) {
    const auto bits = static_cast<uint64_t>(sum);
    const uint32_t low = __shfl_xor_sync(kAllLanes, static_cast<uint32_t>(bits), span);
    const uint32_t high = __shfl_xor_sync(kAllLanes, static_cast<uint32_t>(bits >> 32), span);
    sum += static_cast<int64_t>(static_cast<uint64_t>(high) << 32 | low);
  }
  return sum;
}

/// Adds x[begin, end), at most kTile values, by all lanes. Lane i adds the values with index i mod
/// 32.
__device__ __forceinline__ void add_values(const float* x, int begin, int end, int64_t* words,
                                           int lane) {
  constexpr int kWindow = 31;
  const int start = begin + ((lane - begin) & (kLanes - 1));
  uint32_t absmax = 0;
  for (int i = start; i < end; i += kLanes) {
    const uint32_t magnitude = magnitude_bits(x[i]);
    if (magnitude < kInfinityBits && magnitude > absmax) absmax = magnitude;
  }
  const int top = term_of(bits_float(largest(absmax, kLanes))).position;
  const int base = top >= kWindow ? top - kWindow + 1 : 0;
  int64_t sum = 0;
  for (int i = start; i < end; i += kLanes) {
    const Term t = term_of(x[i]);
    if (magnitude_bits(x[i]) < kInfinityBits && t.position >= base) {
      sum += t.mantissa << (t.position - base);
    } else {
      add_value(x[i], words);
    }
  }
  sum = all_lanes(sum);
  if (lane < 4) add_piece(sum, lane, base, words);
}

}  // namespace lowbit::cuda
