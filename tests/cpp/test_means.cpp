// Means of core/mean_bins.h: the same words in any order, split and instruction set; the mean is
// the exact one, rounded once, where no bit falls below the bins, and within the bound elsewhere.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "core/half.h"
#include "core/mean_bins_loop.h"
#include "core/param/bfloat16.h"
#include "usable_main.h"

namespace {

using namespace lowbit;

std::mt19937_64 bits(11);

enum Kind { kAny, kNear, kBfloat16, kSubnormal, kTies, kOdd, kKinds };

float addend(Kind kind) {
  auto b = static_cast<uint32_t>(bits());
  if (kind == kNear) b = (b & 0x807fffffu) | static_cast<uint32_t>(100 + bits() % 20) << 23;
  if (kind == kBfloat16) b = (b & 0x807f0000u) | static_cast<uint32_t>(100 + bits() % 12) << 23;
  if (kind == kSubnormal) b = (b & 0x807fffffu) | static_cast<uint32_t>(bits() % 60) << 23;
  if (kind == kTies) b = (b & 0x80400000u) | static_cast<uint32_t>(120 + bits() % 4) << 23;
  if (bits() % 16 == 0) b &= 0x80000000u;
  const float x = bits_float(b);
  return kind != kOdd && !std::isfinite(x) ? 1.0f : x;
}

/// The sum of a word, in units of its lower bin.
int64_t units(uint64_t word, int width) {
  const BinSum sum = bin_parts(word);
  return sum.high * (int64_t{1} << width) + sum.low;
}

void words_do_not_depend_on_order() {
  int wrong = 0, vectors = 0;
  for (int turn = 0; turn < 4000; ++turn) {
    const auto kind = static_cast<Kind>(turn % kKinds);
    const int n = turn % 500 == 499 ? MeanBins::kMaxTerms : 1 + static_cast<int>(bits() % 40);
    const int width = bin_width(n), elements = 1 + static_cast<int>(bits() % kBinTile);
    std::vector<float> x(static_cast<size_t>(n * elements));
    for (float& v : x) v = addend(kind);
    std::vector<uint64_t> plain(static_cast<size_t>(elements)), tile(plain);
    for (int k = 0; k < n; ++k) {
      bin_add_tile(tile.data(), &x[static_cast<size_t>(k * elements)], elements, width);
      for (int i = 0; i < elements; ++i) {
        uint64_t& word = plain[static_cast<size_t>(i)];
        word = bin_add(word, x[static_cast<size_t>(k * elements + i)], width);
      }
    }
    vectors += tile != plain;
    for (int i = 0; i < elements; ++i) {  // three parts, shuffled
      std::vector<float> own;
      for (int k = 0; k < n; ++k) own.push_back(x[static_cast<size_t>(k * elements + i)]);
      std::shuffle(own.begin(), own.end(), bits);
      uint64_t part[3] = {};
      for (const float v : own) {
        uint64_t& word = part[bits() % 3];
        word = bin_add(word, v, width);
      }
      wrong += bin_merge(part[2], bin_merge(part[0], part[1])) != plain[static_cast<size_t>(i)];
    }
  }
  check(wrong == 0, "words do not depend on the order of addends and of partial sums");
  check(vectors == 0, "the loop has the words of bin_add");
}

/// Whether `mean` is sum / n, rounded to nearest, ties to even, where all are multiples of 2^-40.
template <class Next, class Value>
bool nearest(__int128 sum, int64_t n, uint32_t mean, Next next, Value value) {
  const auto distance = [&](uint32_t m) {
    const auto scaled = static_cast<__int128>(std::ldexp(value(m), 40)) * n;
    return scaled > sum ? scaled - sum : sum - scaled;
  };
  const __int128 here = distance(mean);
  for (const uint32_t other : {next(mean, 1), next(mean, -1)}) {
    const __int128 there = distance(other);
    if (there < here || (there == here && (mean & 1) != 0)) return false;
  }
  return true;
}

void means_are_rounded_once() {
  int wrong[3] = {};
  for (int turn = 0; turn < 40000; ++turn) {
    const int n = 1 + static_cast<int>(bits() % 30), width = bin_width(n);
    uint64_t word = 0;
    __int128 sum = 0;
    for (int k = 0; k < n; ++k) {
      // Multiples of 2^-16 below 16: every partial sum is exact.
      const auto whole = static_cast<int64_t>(bits() % (turn % 2 ? 64 : 1 << 20)) - 20;
      sum += static_cast<__int128>(whole) << 24;
      word = bin_add(word, static_cast<float>(whole) * 0x1p-16f, width);
    }
    if (sum == 0) continue;
    const float to_odd = bin_mean(word, width, n, true);
    const auto step = [](uint32_t m, int by) { return m + static_cast<uint32_t>(by); };
    // The neighbors of smaller means are not multiples of 2^-40.
    if (std::fabs(static_cast<double>(sum) / n) < std::ldexp(1.0, 40 - 12)) continue;
    wrong[0] += !nearest(sum, n, float_bits(bin_mean(word, width, n, false)), step,
                         [](uint32_t m) { return static_cast<double>(bits_float(m)); });
    wrong[1] += !nearest(sum, n, bfloat16_nearest(to_odd), step, [](uint32_t m) {
      return static_cast<double>(bfloat16_to_float(static_cast<uint16_t>(m)));
    });
    wrong[2] += !nearest(sum, n, half_nearest(to_odd), step, [](uint32_t m) {
      return static_cast<double>(half_to_float(static_cast<uint16_t>(m)));
    });
  }
  check(wrong[0] == 0, "float32 means are the exact ones, rounded once");
  check(wrong[1] == 0, "bfloat16 means are the exact ones, rounded once");
  check(wrong[2] == 0, "float16 means are the exact ones, rounded once");
}

/// A word whose mean by `divisor` lies on, or next to, a float or halfway between two.
uint64_t near_a_tie(int width, int64_t divisor) {
  const int top = 1 + static_cast<int>(bits() % 9);
  const int cut = static_cast<int>(bits() % 34);
  const auto kept = static_cast<__int128>(bits() >> (6 + bits() % 56) >> cut << cut);
  const int64_t limit = int64_t{1} << (width + MeanBins::kBits - 2);
  auto total = static_cast<int64_t>(
      (kept * (bits() % 4 != 0 ? divisor : 1) + static_cast<int>(bits() % 3) - 1) % limit);
  if (bits() % 2 != 0) total = -total;
  const int64_t low =
      (total & ((int64_t{1} << width) - 1)) - (bits() % 2 != 0 ? int64_t{1} << width : 0);
  return bin_word({top, (total - low) >> width, low});
}

void the_loop_has_the_means_of_one() {
  int wrong = 0;
  for (int turn = 0; turn < 200000; ++turn) {
    const int n = 1 + static_cast<int>(bits() % kBinTile);
    const int64_t terms = 1 + static_cast<int64_t>(bits() % MeanBins::kMaxTerms);
    const int width = bin_width(terms);
    const int64_t divisor = turn % 3 == 0   ? 1 + static_cast<int64_t>(bits() % (1 << 24))
                            : turn % 3 == 1 ? terms
                                            : 1 << 24;
    uint64_t word[kBinTile];
    float mean[kBinTile];
    for (int i = 0; i < n; ++i) {
      word[i] = turn % 2 ? near_a_tie(width, divisor) : 0;
      if (turn % 2 == 0) {
        const auto kind = static_cast<Kind>(turn / 2 % kKinds);
        for (int k = 0; k < 3; ++k) word[i] = bin_add(word[i], addend(kind), width);
      }
    }
    for (const bool odd : {false, true}) {
      bin_mean_tile(word, mean, n, width, divisor, odd);
      for (int i = 0; i < n; ++i)
        wrong += float_bits(mean[i]) != float_bits(bin_mean(word[i], width, divisor, odd));
    }
  }
  check(wrong == 0, "the loop has the means of bin_mean");
}

void sums_are_within_the_bound() {
  int wrong = 0, exact = 0, count = 0;
  for (int turn = 0; turn < 20000; ++turn) {
    const auto kind = static_cast<Kind>(1 + turn % 3);
    const int n = 1 + static_cast<int>(bits() % 60), width = bin_width(n);
    uint64_t word = 0;
    long double sum = 0, largest = 0;  // exact: the exponents lie within 20
    for (int k = 0; k < n; ++k) {
      const float x = addend(kind == kSubnormal ? kNear : kind);
      word = bin_add(word, x, width);
      sum += static_cast<long double>(x);
      largest = std::max(largest, std::fabs(static_cast<long double>(x)));
    }
    if (largest == 0) continue;
    const long double kept = std::ldexp(static_cast<long double>(units(word, width)),
                                        width * (bin_parts(word).top - 1) - 149);
    const long double off = std::fabs(kept - sum);
    wrong += off > n * std::ldexp(largest, -width);
    if (kind == kBfloat16) exact += off == 0, ++count;
  }
  check(wrong == 0, "sums are off by at most 2^-W of the largest addend, for each addend");
  check(exact > count * 9 / 10, "most sums of bfloat16 addends are exact");
}

void specials() {
  const float infinity = bits_float(kInfinityBits), nan = bits_float(kCanonicalNan);
  const auto mean = [](std::initializer_list<float> x) {
    uint64_t word = 0;
    for (const float v : x) word = bin_add(word, v, bin_width(4));
    return float_bits(bin_mean(word, bin_width(4), 4, false));
  };
  check(mean({}) == 0 && mean({-0.0f, 0.0f}) == 0 && mean({1.0f, -1.0f}) == 0, "zeros are +0");
  check(mean({1.0f, infinity, 2.0f}) == kInfinityBits, "infinity stays");
  check(mean({-infinity, 1.0f}) == (kInfinityBits | 0x80000000u), "minus infinity stays");
  check(mean({infinity, -infinity}) == kCanonicalNan, "infinities of both signs are NaN");
  check(mean({nan, infinity, 1.0f}) == kCanonicalNan, "NaN stays");
  const float most = bits_float(0x7f7fffffu);
  check(mean({most, most, most, most}) == 0x7f7fffffu, "a sum beyond float32 has a finite mean");
  check(
      float_bits(bin_mean(bin_add(bin_add(0, most, 28), most, 28), 28, 1, false)) == kInfinityBits,
      "a mean beyond float32 is infinite");
  const float least = bits_float(1);
  check(mean({least, least, least}) == 1 && mean({least, least}) == 0, "subnormal ties to even");
  int widths = 0;
  for (int64_t terms = 1; terms <= MeanBins::kMaxTerms; ++terms) {
    const int width = bin_width(terms);
    widths += terms * (int64_t{1} << (width - 1)) >= int64_t{1} << (MeanBins::kBits - 1) ||
              (254 + 23) / width > 15;
  }
  check(widths == 0, "any number of addends fits into its bins, and the bins into float32's range");
  int divided = 0;
  for (uint64_t width = 18; width <= 29; ++width) {
    for (uint64_t e = 0; e <= 277; ++e) divided += (e * (65536 / width + 1)) >> 16 != e / width;
  }
  check(divided == 0, "the reciprocal of a width divides");
}

}  // namespace

int run_tests() {
  words_do_not_depend_on_order();
  means_are_rounded_once();
  the_loop_has_the_means_of_one();
  sums_are_within_the_bound();
  specials();
  return finish();
}
