// Exact sums (core/exact_sum.h) that a lane keeps in registers over many terms, none of them
// negative.
//
// Terms lie in a window of exponents, in which 64 bits hold their sum. A term above the window
// moves it: what was added so far goes to the words. A term below it goes to the words by itself.
#pragma once

#include "cuda/step/adam.cuh"
#include "cuda/sums.cuh"

namespace lowbit::cuda {

/// The position of the largest of 8 terms, or -1 if one is not finite.
__device__ __forceinline__ int top_of(const float (&x)[kEach]) {
  const float most = largest_magnitude(x);
  return float_bits(most) >= kInfinityBits ? -1 : term_of(most).position;
}

/// Calls add(e, term) for 8 finite terms, which are units of the window that begins at `base` and
/// reaches high enough, or 0. Returns whether all of them belong into it.
template <class Add>
__device__ __forceinline__ bool add_terms(const float (&x)[kEach], int base, const Add& add) {
  bool all = true;
  for (int e = 0; e < kEach; ++e) {
    const Term t = term_of(x[e]);
    const int shift = t.position - base;
    all = all && (shift >= 0 || magnitude_bits(x[e]) == 0);
    add(e, shift >= 0 ? t.mantissa << (shift & 63) : 0);
  }
  return all;
}
/// Whether add_terms leaves out a term. finite: whether all 8 are.
__device__ __forceinline__ bool is_left(float x, int base, bool finite) {
  return magnitude_bits(x) != 0 && !(finite && term_of(x).position >= base);
}

/// The window of sums of at most kTerms terms.
template <int kTerms>
struct Window {
  static constexpr int kRoom = kTerms == 32 ? 5 : 8;  // log2
  static_assert(1 << kRoom == kTerms);
  static constexpr int kAbove = 62 - 24 - kRoom, kBelow = kAbove - 6;
  static constexpr int kLast = 16 * (ExactSum::kBins - 3) - 1;  // four pieces stay below kBins
  static_assert(kLast + kAbove >= 253);                         // the largest position
  int base = -1;  // the position of the lowest bit; -1 before the first term

  /// Whether terms up to this one have room.
  __device__ __forceinline__ bool holds(int position) const {
    return base >= 0 && position <= base + kAbove;
  }
  __device__ __forceinline__ void move(int position) {
    base = position > kBelow ? position - kBelow : 0;
    base = base < kLast ? base : kLast;
  }
};

/// Sums of 8 terms at a time, over 32 calls at most: of 8 columns, a term each, or of all as one.
template <bool kColumns>
struct LaneSums {
  static constexpr int kSums = kColumns ? kEach : 1;
  Window<kColumns ? 32 : 32 * kEach> window;
  int64_t sum[kSums] = {};

  /// words: those of the first sum; the others follow.
  __device__ __forceinline__ void add(const float (&x)[kEach], int64_t* words) {
    const int top = top_of(x);
    if (top >= 0 && !window.holds(top)) {
      flush(words);
      window.move(top);
    }
    const auto place = [&](int e, int64_t term) { sum[kColumns ? e : 0] += term; };
    if (top >= 0 && add_terms(x, window.base, place)) return;
    for (int e = 0; e < kEach; ++e) {  // rare
      if (is_left(x[e], window.base, top >= 0))
        add_value(x[e], words + (kColumns ? e * ExactSum::kWords : 0));
    }
  }
  __device__ __forceinline__ void flush(int64_t* words) {
    for (int i = 0; i < kSums; ++i) {
      for (int k = 0; sum[i] != 0 && k < 4; ++k)
        add_piece(sum[i], k, window.base, words + i * ExactSum::kWords);
      sum[i] = 0;
    }
  }
};

/// Adds the 8 terms of every lane to a sum that all lanes share, and to another one where `also` is
/// not null: those of a row.
__device__ __forceinline__ void add_row(const float (&x)[kEach], int64_t* words, int64_t* also,
                                        int lane) {
  const int top = top_of(x);
  const auto highest = static_cast<uint32_t>(top < 0 ? 0 : top);
  Window<32 * kEach> window;
  window.move(static_cast<int>(__reduce_max_sync(kAllLanes, highest)));
  int64_t sum = 0;
  const auto place = [&](int, int64_t term) { sum += term; };
  if (top < 0 || !add_terms(x, window.base, place)) {  // rare
    for (int e = 0; e < kEach; ++e) {
      if (!is_left(x[e], window.base, top >= 0)) continue;
      add_value(x[e], words);
      if (also != nullptr) add_value(x[e], also);
    }
  }
  sum = all_lanes(sum);
  if (lane < 4) {
    add_piece(sum, lane, window.base, words);
    if (also != nullptr) add_piece(sum, lane, window.base, also);
  }
}

}  // namespace lowbit::cuda
