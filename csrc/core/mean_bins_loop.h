// bin_add and bin_mean of core/mean_bins.h for many elements: loops that compilers turn into
// vectors. What is rare takes bin_add or bin_mean itself: addends that are not finite, words that
// have met one, and means that are not normal floats.
//
// A mean is divided in doubles. The sum of the two bins is s + e exactly, s = high 2^W + low
// rounded, q = s / divisor nearly, and r = s - q divisor exactly: q is cut in two parts of 29 and
// 24 bits, whose products with a divisor of up to 24 bits are exact. Then (s + e) / divisor = q +
// (r + e) / divisor, r + e has few bits and is exact too, and q + (r + e) / divisor rounded to odd
// keeps in its last bit whether anything was lost. Rounding that to 24 bits or fewer is rounding
// once.
#pragma once

#include "core/mean_bins.h"

namespace lowbit {

constexpr int kBinTile = 64;  // elements in one pass

/// Adding and subtracting it rounds a double below 2^51 to an integer; the sum's bits less its own
/// are that integer.
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

/// Writes the means of n <= kBinTile words, rounded to float32: to nearest, or to odd.
/// 1 <= divisor <= 2^24.
LB_HD void bin_mean_tile(const uint64_t* word, float* mean, int n, int width, int64_t divisor,
                         bool odd) {
  constexpr uint64_t kUpper = uint64_t{0x433} << 52;  // 2^52: an integer below it in its low bits
  constexpr uint64_t kSign = uint64_t{1} << (MeanBins::kBits - 1), kTail = (uint64_t{1} << 24) - 1;
  constexpr uint64_t kMagnitude = ~uint64_t{0} >> 1, kDropped = (uint64_t{1} << 29) - 1;
  constexpr uint64_t kLeast = uint64_t{1023 - 126} << 52, kBeyond = uint64_t{1023 + 128} << 52;
  constexpr uint64_t kRebias = uint64_t{1023 - 127} << 52;
  constexpr double kOffset = 0x1p52 + static_cast<double>(kSign);
  const double by = static_cast<double>(divisor), inverse = 1 / by;
  const double bin = bits_double(static_cast<uint64_t>(1023 + width) << 52);
  const auto bits_of_bin = static_cast<uint64_t>(width);
  const uint64_t keeps_odd = odd ? ~uint64_t{0} : 0;
  uint64_t rare = 0,
           made[kBinTile];  // 64 bits until all are made: a loop of one width is made of vectors
  for (int i = 0; i < n; ++i) rare |= static_cast<uint64_t>(word[i] - 1 < 7);  // flags
  for (int i = 0; i < n; ++i) {
    const uint64_t top = word[i] >> 60;
    const double high = bits_double(kUpper |
                                    (((word[i] >> MeanBins::kBits) & MeanBins::kMask) ^ kSign)) -
                        kOffset,
                 low = bits_double(kUpper | ((word[i] & MeanBins::kMask) ^ kSign)) - kOffset;
    const double above = high * bin, s = above + low, taken = s - above;
    const double e = (above - (s - taken)) + (low - taken);
    const double q = s * inverse, upper = bits_double(double_bits(q) & ~kTail);
    const double r = (s - upper * by) - (q - upper) * by;
    const double more = (r + e) / by, sum = q + more, lost = more - (sum - q);
    const uint64_t same = double_bits(sum), even = ~same & 1;
    const uint64_t inward = (double_bits(lost) ^ same) >> 63;  // 1: truncation took a bit off
    const uint64_t inexact = lost == 0 ? 0 : even;
    const uint64_t to_odd = same + inexact - 2 * (inexact & inward);
    const double scale = bits_double((1023 - 149 + bits_of_bin * top - bits_of_bin) << 52);
    const uint64_t scaled = double_bits(bits_double(to_odd) * scale), size = scaled & kMagnitude;
    rare |= static_cast<uint64_t>(size - 1 < kLeast - 1) | static_cast<uint64_t>(size >= kBeyond);
    const uint64_t rebiased = size - kRebias, kept = rebiased >> 29, rest = rebiased & kDropped;
    const uint64_t nearest = (rebiased + (kDropped >> 1) + (kept & 1)) >> 29;
    const uint64_t cut = kept | static_cast<uint64_t>(rest != 0);
    const uint64_t magnitude = (cut & keeps_odd) | (nearest & ~keeps_odd);
    made[i] = size == 0 ? 0 : magnitude | (scaled >> 63 << 31);
  }
  for (int i = 0; i < n; ++i) mean[i] = bits_float(static_cast<uint32_t>(made[i]));
  if (rare != 0)
    for (int i = 0; i < n; ++i) mean[i] = bin_mean(word[i], width, divisor, odd);
}

}  // namespace lowbit
