// bin_add of core/mean_bins.h for many elements: a loop that compilers turn into vectors. Addends that
// are not finite, and words that have met one, take bin_add itself.
#pragma once

#include "core/mean_bins.h"

namespace lowbit {

constexpr int kBinTile = 64;  // elements in one pass

/// Adding and subtracting it rounds a double below 2^51 to an integer; the sum's bits less its own are
/// that integer.
constexpr double kRounder = 0x1.8p52;

LB_HD uint64_t double_bits(double x) { return __builtin_bit_cast(uint64_t, x); }
LB_HD double bits_double(uint64_t b) { return __builtin_bit_cast(double, b); }

/// Adds n <= kBinTile addends to their words.
LB_HD void bin_add_tile(uint64_t* word, const float* x, int n, int width) {
  uint64_t flagged = 0;
  for (int i = 0; i < n; ++i) {
    flagged |= static_cast<uint64_t>(magnitude_bits(x[i]) >= kInfinityBits);
    flagged |= static_cast<uint64_t>(word[i] - 1 < 7);  // flags
  }
  if (flagged != 0) {
    for (int i = 0; i < n; ++i) word[i] = bin_add(word[i], x[i], width);
    return;
  }
  const uint64_t rounder = double_bits(kRounder);
  const double step = bits_double(static_cast<uint64_t>(1023 + width) << 52);
  const auto bits_of_bin = static_cast<uint64_t>(width);
  const uint64_t reciprocal = 65536 / bits_of_bin + 1;  // of the width; exact for dividends to 277
  for (int i = 0; i < n; ++i) {
    const uint64_t magnitude = magnitude_bits(x[i]), exponent = magnitude >> 23;
    uint64_t reach = ((exponent + 23) * reciprocal) >> 16;
    reach = reach | static_cast<uint64_t>(reach == 0);
    reach = magnitude == 0 ? 0 : reach;
    const uint64_t before = word[i], top = before >> 60, raised = top > reach ? top : reach;
    const uint64_t by = raised - top;
    const auto high = static_cast<uint64_t>(bin_signed(before >> MeanBins::kBits)),
               low = static_cast<uint64_t>(bin_signed(before));
    const uint64_t kept = by == 0 ? high : 0, moved = by == 0 ? low : by == 1 ? high : 0;
    const double scale = bits_double((1023 + 149 - bits_of_bin * raised) << 52);
    const double scaled = static_cast<double>(x[i]) * scale, whole = scaled + kRounder;
    const double rest = (scaled - (whole - kRounder)) * step + kRounder;
    const uint64_t new_high = kept + (double_bits(whole) - rounder),
                   new_low = moved + (double_bits(rest) - rounder);
    word[i] = raised << 60 | (new_high & MeanBins::kMask) << MeanBins::kBits |
              (new_low & MeanBins::kMask);
  }
}

}  // namespace lowbit
