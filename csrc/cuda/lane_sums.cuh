// Exact sums (core/exact_sum.h) that a lane keeps in registers over many terms, none of them
// negative.
//
// Terms lie in a window of exponents, in which 64 bits hold their sum. A term above the window moves
// it: what was added so far goes to the words. A term below it goes to the words by itself.
#pragma once

#include "cuda/sums.cuh"

namespace lowbit::cuda {

/// kTerms: the most terms of a sum between two calls of flush, a power of two.
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
  __device__ __forceinline__ void flush(int64_t sum, int64_t* words) const {
    for (int k = 0; k < 4; ++k) {
      const int64_t piece = k < 3 ? (sum >> (16 * k)) & 0xffff : sum >> 48;
      add_word(words + (base >> 4) + k, piece << (base & 15));
    }
  }
};

/// The position of the largest of 8 terms, or -1 if one is not finite.
__device__ __forceinline__ int top_of(const float (&x)[8]) {
  uint32_t most = 0;
  for (int e = 0; e < 8; ++e) most = magnitude_bits(x[e]) > most ? magnitude_bits(x[e]) : most;
  return most >= kInfinityBits ? -1 : term_of(bits_float(most)).position;
}

/// Whether a term belongs into a window whose upper end is high enough. Zero does not.
__device__ __forceinline__ bool belongs(float x, int base) {
  return magnitude_bits(x) < kInfinityBits && term_of(x).position >= base;
}
/// Calls add(e, term) for 8 finite terms, which are units of the window, or 0. Returns whether all
/// of them belong into it.
template <class Add>
__device__ __forceinline__ bool add_terms(const float (&x)[8], int base, const Add& add) {
  bool all = true;
  for (int e = 0; e < 8; ++e) {
    const Term t = term_of(x[e]);
    const int shift = t.position - base;
    all = all && (shift >= 0 || magnitude_bits(x[e]) == 0);
    add(e, shift >= 0 ? t.mantissa << (shift & 63) : 0);
  }
  return all;
}

/// Eight sums, of one term each at a time: columns.
struct ColumnWindow {
  Window<32> window;
  int64_t sum[8] = {};

  /// words: those of the first column; the others follow.
  __device__ __forceinline__ void add(const float (&x)[8], int64_t* words) {
    const int top = top_of(x);
    if (top >= 0 && !window.holds(top)) {
      flush(words);
      window.move(top);
    }
    const auto place = [&](int e, int64_t term) { sum[e] += term; };
    if (top >= 0 && add_terms(x, window.base, place)) return;
    for (int e = 0; e < 8; ++e) {  // rare
      if ((top < 0 || !belongs(x[e], window.base)) && magnitude_bits(x[e]) != 0)
        add_value(x[e], words + e * ExactSum::kWords);
    }
  }
  __device__ __forceinline__ void flush(int64_t* words) {
    if (window.base < 0) return;
    for (int e = 0; e < 8; ++e) {
      if (sum[e] != 0) window.flush(sum[e], words + e * ExactSum::kWords);
      sum[e] = 0;
    }
  }
};

/// One sum of 8 terms at a time.
struct TotalWindow {
  Window<256> window;
  int64_t sum = 0;

  __device__ __forceinline__ void add(const float (&x)[8], int64_t* words) {
    const int top = top_of(x);
    if (top >= 0 && !window.holds(top)) {
      flush(words);
      window.move(top);
    }
    const auto place = [&](int, int64_t term) { sum += term; };
    if (top >= 0 && add_terms(x, window.base, place)) return;
    for (int e = 0; e < 8; ++e) {  // rare
      if ((top < 0 || !belongs(x[e], window.base)) && magnitude_bits(x[e]) != 0)
        add_value(x[e], words);
    }
  }
  __device__ __forceinline__ void flush(int64_t* words) {
    if (window.base >= 0 && sum != 0) window.flush(sum, words);
    sum = 0;
  }
};

/// Adds the 8 terms of every lane to a sum that all lanes share, and to another one where `also` is
/// not null: those of a row.
__device__ __forceinline__ void add_row(const float (&x)[8], int64_t* words, int64_t* also,
                                        int lane) {
  uint32_t most = 0;
  for (int e = 0; e < 8; ++e) most = magnitude_bits(x[e]) > most ? magnitude_bits(x[e]) : most;
  const bool finite = most < kInfinityBits;
  Window<256> window;
  window.move(term_of(bits_float(__reduce_max_sync(kAllLanes, finite ? most : 0u))).position);
  int64_t sum = 0;
  const auto place = [&](int, int64_t term) { sum += term; };
  if (!finite || !add_terms(x, window.base, place)) {  // rare
    for (int e = 0; e < 8; ++e) {
      if ((finite && belongs(x[e], window.base)) || magnitude_bits(x[e]) == 0) continue;
      add_value(x[e], words);
      if (also != nullptr) add_value(x[e], also);
    }
  }
  sum = all_lanes(sum);
  if (lane < 4) {
    const int64_t piece = lane < 3 ? (sum >> (16 * lane)) & 0xffff : sum >> 48;
    const int at = (window.base >> 4) + lane;
    add_word(words + at, piece << (window.base & 15));
    if (also != nullptr) add_word(also + at, piece << (window.base & 15));
  }
}

}  // namespace lowbit::cuda
