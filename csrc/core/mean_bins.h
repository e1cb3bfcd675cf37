// Means of gradients whose bits do not depend on the order of the addends: not on micro-batches,
// ranks or partial sums. One 64-bit word for each element.
//
// The grid of bins is fixed: bin e counts multiples of u(e) = 2^(W e - 149), W bits apart. Let
//
//   R(e, x) = x, rounded to the nearest multiple of u(e), ties to even
//   E       = the highest bin that any addend reaches:
//             reach(x) = the e >= 1 with |x| < u(e + 1) / 2
//   high    = sum of R(E, x) / u(E)
//   low     = sum of (R(E - 1, x) - R(E, x)) / u(E - 1)
//
// Both sums are of integers, and each term is a function of one addend and of the bin, so addition
// is associative. When an addend reaches a higher bin, `low` is dropped, `high` becomes `low`, and
// the new `high` is zero: R(E + 1, x) = 0 for every earlier x, because |x| < u(E + 1) / 2. The mean
// is
//
//   (high * 2^W + low) * u(E - 1) / divisor, rounded once.
//
// Accuracy: an addend loses at most u(E - 1) / 2, and the largest addend is at least u(E) / 2. So
// the sum of n addends is off by at most n * 2^-W of the largest one, before the rounding. It is
// exact if no addend has a bit below u(E - 1).
//
// Room: |terms| <= 2^(W - 1), so n addends fit into 30 bits with W = 30 - (bits of n). 4,095
// addends leave W = 18, whose 16 bins cover float32. W follows from the number of addends of a
// step, which does not depend on the ranks.
//
// The method is that of Demmel and Nguyen, "Parallel Reproducible Summation", IEEE Transactions on
// Computers 64(7), 2015, with integers instead of floats.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/macros.h"

namespace lowbit {

/// The layout of a word: [top bin : 4][high : 30][low : 30], both in two's complement. Top bin 0:
/// no finite addend counts, and the low bits are flags. A word of zeros is the empty sum.
struct MeanBins {
  static constexpr int kBits = 30, kMaxTerms = 4095;
  static constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
  enum Flag : uint64_t { kPlusInfinity = 1, kMinusInfinity = 2, kNan = 4 };
};

/// W for sums of up to `terms` addends, 1 to kMaxTerms: from 29 down to 18.
LB_HD constexpr int bin_width(int64_t terms) {
  int width = MeanBins::kBits;
  for (; terms > 0; terms >>= 1) --width;
  return width;
}

/// A word in parts.
struct BinSum {
  int top;
  int64_t high, low;
};

LB_HD int64_t bin_signed(uint64_t bits) {
  constexpr uint64_t kSign = uint64_t{1} << (MeanBins::kBits - 1);
  return static_cast<int64_t>(((bits & MeanBins::kMask) ^ kSign) - kSign);
}

LB_HD BinSum bin_parts(uint64_t word) {
  return {static_cast<int>(word >> 60), bin_signed(word >> MeanBins::kBits), bin_signed(word)};
}

LB_HD uint64_t bin_word(BinSum sum) {
  return static_cast<uint64_t>(sum.top) << 60 |
         (static_cast<uint64_t>(sum.high) & MeanBins::kMask) << MeanBins::kBits |
         (static_cast<uint64_t>(sum.low) & MeanBins::kMask);
}

/// The sum with its top bin raised: whole bins fall away.
LB_HD BinSum bin_raised(BinSum sum, int top) {
  if (top == sum.top + 1) return {top, 0, sum.high};
  return top > sum.top ? BinSum{top, 0, 0} : sum;
}

/// mantissa / 2^shift, to the nearest integer, ties to even. mantissa < 2^24, shift > -40.
LB_HD int64_t bin_rounded(int64_t mantissa, int shift) {
  if (shift <= 0) return mantissa << -shift;
  if (shift > 24) return 0;
  const int64_t whole = mantissa >> shift, rest = mantissa - (whole << shift),
                half = int64_t{1} << (shift - 1);
  return whole + (rest > half || (rest == half && (whole & 1) != 0));
}

/// Adds one addend to a word.
LB_HD uint64_t bin_add(uint64_t word, float x, int width) {
  const uint32_t bits = float_bits(x), exponent = bits >> 23 & 0xffu;
  BinSum sum = bin_parts(word);
  if (exponent == 255) {
    const uint64_t flag = is_nan_bits(bits) ? MeanBins::kNan
                          : bits >> 31      ? MeanBins::kMinusInfinity
                                            : MeanBins::kPlusInfinity;
    return (sum.top == 0 ? word : 0) | flag;
  }
  if (magnitude_bits(x) == 0 || (sum.top == 0 && word != 0)) return word;
  // |x| < 2^(exponent + 23 - 149).
  const int above = (static_cast<int>(exponent) + 23) / width, reach = above > 1 ? above : 1;
  sum = bin_raised(sum, reach > sum.top ? reach : sum.top);
  const int position = exponent > 0 ? static_cast<int>(exponent) - 1 : 0;
  const int64_t mantissa = static_cast<int64_t>(bits & 0x7fffffu) | (exponent > 0 ? 0x800000 : 0);
  const int shift = width * sum.top - position;
  const int64_t high = bin_rounded(mantissa, shift),
                low = bin_rounded(mantissa, shift - width) - (high << width);
  sum.high += bits >> 31 ? -high : high;
  sum.low += bits >> 31 ? -low : low;
  return bin_word(sum);
}

/// Adds two words, of up to kMaxTerms addends together.
LB_HD uint64_t bin_merge(uint64_t a, uint64_t b) {
  BinSum x = bin_parts(a), y = bin_parts(b);
  if (x.top == 0 && a != 0) return a | (y.top == 0 ? b : 0);
  if (y.top == 0) return b != 0 ? b : a;
  if (x.top == 0) return b;
  const int top = x.top > y.top ? x.top : y.top;
  x = bin_raised(x, top), y = bin_raised(y, top);
  return bin_word({top, x.high + y.high, x.low + y.low});
}

/// magnitude * 2^exponent as a float, rounded once; `more`: whether a nonzero part below
/// magnitude's last bit was cut off. To odd, the last bit is set where anything was lost; a second
/// rounding to 16 bits is then the only one. magnitude > 0.
LB_HD float bin_float(uint64_t magnitude, bool more, int exponent, bool odd) {
#if defined(__CUDA_ARCH__)
  const int zeros = __clzll(static_cast<long long>(magnitude));
#else
  const int zeros = __builtin_clzll(magnitude);
#endif
  magnitude <<= zeros;
  const int biased = exponent - zeros + 63 + 127;  // of the float, if normal
  if (biased >= 255) return bits_float(kInfinityBits);
  int dropped = biased > 0 ? 40 : 41 - biased;
  uint64_t kept = 0, rest = 1;  // rest: what is dropped, as a fraction of 2^64
  if (dropped < 64)
    kept = magnitude >> dropped, rest = magnitude << (64 - dropped);
  else if (dropped == 64)
    rest = magnitude;
  constexpr uint64_t kHalf = uint64_t{1} << 63;
  if (odd)
    kept |= rest != 0 || more;
  else if (rest > kHalf || (rest == kHalf && (more || (kept & 1) != 0)))
    ++kept;
  const uint32_t above = biased > 0 ? static_cast<uint32_t>(biased - 1) << 23 : 0;
  return bits_float(above + static_cast<uint32_t>(kept));
}

/// The mean of a word's addends, rounded to float32: to nearest, or to odd. The empty sum is +0,
/// and so is a sum of zeros of any sign.
LB_HD float bin_mean(uint64_t word, int width, int64_t divisor, bool odd) {
  const BinSum sum = bin_parts(word);
  if (sum.top == 0) {
    if (word == 0) return 0.0f;
    if (word == MeanBins::kPlusInfinity) return bits_float(kInfinityBits);
    if (word == MeanBins::kMinusInfinity) return bits_float(kInfinityBits | 0x80000000u);
    return bits_float(kCanonicalNan);
  }
  const int64_t total = sum.high * (int64_t{1} << width) + sum.low;
  if (total == 0) return 0.0f;
  uint64_t magnitude = static_cast<uint64_t>(total < 0 ? -total : total);
#if defined(__CUDA_ARCH__)
  const int zeros = __clzll(static_cast<long long>(magnitude));
#else
  const int zeros = __builtin_clzll(magnitude);
#endif
  magnitude <<= zeros;  // a quotient of at least 52 bits
  const auto by = static_cast<uint64_t>(divisor);
  const uint64_t quotient = magnitude / by;
  const float mean =
      bin_float(quotient, quotient * by != magnitude, width * (sum.top - 1) - 149 - zeros, odd);
  return total < 0 ? -mean : mean;
}

}  // namespace lowbit
