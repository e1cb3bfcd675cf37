// Sums of float32 values without rounding, so that neither order nor number of shards matters.
//
// A finite float is +-m * 2^(position - 149) with an integer m < 2^24 and a position in 0..253. Bin
// k holds the sum of +-m * 2^(position mod 16) for position / 16 = k: integers, of at most 40 bits
// each, so 2^23 values fit before `exact_carry` must make room. Bins of different ranks add up. The
// last bin counts values that are not finite; with one of them the sum is NaN.
#pragma once

#include <cstdint>

#include "core/bits.h"

namespace lowbit {

constexpr int kExactBins = 17;  // 16 of values, one that counts the others

LB_HD void exact_split(float x, int& bin, int64_t& value) {
  const uint32_t b = float_bits(x), e = (b >> 23) & 0xffu;
  const uint32_t position = e > 0 ? e - 1 : 0;
  const int64_t m = static_cast<int64_t>((b & 0x7fffffu) | (e > 0 ? 0x800000u : 0u))
                    << (position & 15);
  bin = e == 255 ? 16 : static_cast<int>(position >> 4);
  value = e == 255 ? 1 : (b >> 31 ? -m : m);
}

LB_HD void exact_add(float x, int64_t* bins) {
  int bin;
  int64_t value;
  exact_split(x, bin, value);
  bins[bin] += value;
}

/// n values, in four sets of bins by turns: an addition does not wait for the one before.
LB_HD void exact_add(const float* x, int n, int64_t* bins) {
  int64_t bank[4][kExactBins] = {};
  int i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int j = 0; j < 4; ++j) exact_add(x[i + j], bank[j]);
  }
  for (; i < n; ++i) exact_add(x[i], bank[0]);
  for (int k = 0; k < kExactBins; ++k)
    bins[k] += (bank[0][k] + bank[1][k]) + (bank[2][k] + bank[3][k]);
}

/// The same sum with digits of 16 bits, all but the highest in [0, 2^16): the one way to write it.
LB_HD void exact_carry(int64_t* bins) {
  for (int k = 0; k < 15; ++k) {
    bins[k + 1] += bins[k] >> 16;
    bins[k] &= 0xffff;
  }
}

/// The sum, within 2^-50 of itself and a function of the sum alone.
LB_HD double exact_value(const int64_t* bins) {
  if (bins[16] != 0) return static_cast<double>(bits_float(kCanonicalNan));
  int64_t digit[16];
  for (int k = 0; k < 16; ++k) digit[k] = bins[k];
  exact_carry(digit);
  double sum = 0.0;
  for (int k = 15; k >= 0; --k) sum = sum * 65536.0 + static_cast<double>(digit[k]);
  return sum * 0x1p-149;
}

}  // namespace lowbit
