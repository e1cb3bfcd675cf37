// Sums of float32 terms without any rounding. The sum does not depend on the order of the terms, on
// tiles, or on threads and ranks (ranks add their words as int64).
//
//   finite x = sign * m * 2^(position - 149),  m < 2^24,  position = max(exponent, 1) - 1 (0..253)
//   word[position >> 4] += sign * (m << (position & 15))      word i counts units of 2^(16 i - 149)
//   word[16] takes what the others carry
//   word[17] counts the terms that are infinite or NaN
//
// A term is below 2^39 units of its word, so 2^23 terms fit on top of canonical words before the
// next carry, even after the words of 2^15 ranks were added. Canonical words: words 0..15 lie in
// [0, 2^16) and word 16 has the sign. Equal sums have equal canonical words.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/macros.h"

namespace lowbit {

struct ExactSum {
  static constexpr int kBins = 17, kNonFinite = 17, kWords = 18;
  /// The number of terms that may be added between two calls of exact_carry.
  static constexpr int64_t kRoom = int64_t{1} << 23;
};

/// Adds one term. `word` has kWords integers, zero at first.
LB_HD void exact_add(float x, int64_t* word) {
  const uint32_t bits = float_bits(x), exponent = bits >> 23 & 0xffu;
  if (exponent == 255) {
    word[ExactSum::kNonFinite] += 1;
    return;
  }
  const uint32_t position = exponent ? exponent - 1 : 0;
  const int64_t mantissa = static_cast<int64_t>(bits & 0x7fffffu) | (exponent ? 0x800000 : 0);
  const int64_t term = mantissa << (position & 15u);
  word[position >> 4] += bits >> 31 ? -term : term;
}

/// Adds the words of another sum, as a reduction over ranks does. Both must be canonical.
LB_HD void exact_merge(const int64_t* from, int64_t* word) {
  for (int i = 0; i < ExactSum::kWords; ++i) word[i] += from[i];
}

LB_HD void exact_carry(int64_t* word) {
  for (int i = 0; i + 1 < ExactSum::kBins; ++i) {
    word[i + 1] += word[i] >> 16;  // rounds toward minus infinity
    word[i] &= 0xffff;
  }
}

/// 2^n as a double, n in [-1022, 1023].
LB_HD constexpr double power_of_two(int n) {
  return __builtin_bit_cast(double, static_cast<uint64_t>(n + 1023) << 52);
}

/// The sum, rounded once to the nearest double, ties to even. NaN if any term was not finite. The
/// words need not be canonical. `digit` is scratch for kBins integers, in shared memory on a GPU.
LB_HD double exact_value(const int64_t* word, int64_t* digit) {
  if (word[ExactSum::kNonFinite] != 0) return __builtin_bit_cast(double, 0x7ff8000000000000ull);
  for (int i = 0; i < ExactSum::kBins; ++i) digit[i] = word[i];
  exact_carry(digit);
  const bool negative = digit[ExactSum::kBins - 1] < 0;
  if (negative) {
    for (int i = 0; i < ExactSum::kBins; ++i) digit[i] = -digit[i];
    exact_carry(digit);
  }
  // Take the highest 48 to 63 bits, then extend them to 63. Nonzero bits below set the lowest one.
  int i = ExactSum::kBins - 1;
  uint64_t top = static_cast<uint64_t>(digit[i]);
  while (i > 0 && top < (1ull << 47)) top = top << 16 | static_cast<uint64_t>(digit[--i]);
  int exponent = 16 * i - 149;
  if (i > 0) {
    int more = 0;
    while (top << more < (1ull << 62)) ++more;
    const uint64_t next = static_cast<uint64_t>(digit[--i]);
    uint64_t below = next & ((1ull << (16 - more)) - 1);
    top = top << more | next >> (16 - more);
    exponent -= more;
    while (i > 0) below |= static_cast<uint64_t>(digit[--i]);
    top |= below != 0;
  }
  const double magnitude = static_cast<double>(static_cast<int64_t>(top)) * power_of_two(exponent);
  return negative ? -magnitude : magnitude;
}

LB_HD double exact_value(const int64_t* word) {
  int64_t digit[ExactSum::kBins];
  return exact_value(word, digit);
}

/// Adds a double that is a whole number, below 2^53, of units 2^(position - 149), position < 240.
LB_HD void exact_add_units(double sum, int position, int64_t* word) {
  const int64_t units = static_cast<int64_t>(sum * power_of_two(149 - position));
  const int bin = position >> 4, shift = position & 15;
  word[bin] += (units & 0xffff) << shift;
  word[bin + 1] += (units >> 16 & 0xffff) << shift;
  word[bin + 2] += (units >> 32) * (int64_t{1} << shift);
}

#if defined(__CUDACC__)
/// Adds n terms.
LB_HD void exact_add(const float* x, int n, int64_t* word) {
  for (int i = 0; i < n; ++i) exact_add(x[i], word);
}
#else
#if defined(__AVX512F__)
constexpr int kExactLanes = 8;
#else
constexpr int kExactLanes = 4;  // compilers split vectors where registers are shorter
#endif
/// Adds n terms, in chunks of 256. The sum of 256 terms whose exponents lie within 21 of each other
/// is exact in double, in any order (24 + 20 + 8 = 52 bits). A chunk is two such sums in vector
/// lanes, over the upper and the lower 21 exponents below its largest. Smaller terms are added one
/// by one.
LB_HD void exact_add(const float* x, int n, int64_t* word) {
  constexpr int kChunk = 256, kLanes = kExactLanes, kSpan = 21;
  using Floats = float __attribute__((vector_size(4 * kLanes)));
  using Bits = int32_t __attribute__((vector_size(4 * kLanes)));
  using Doubles = double __attribute__((vector_size(8 * kLanes)));
  for (; n > 0; x += kChunk, n -= kChunk) {
    const int count = n < kChunk ? n : kChunk, whole = count & ~(kLanes - 1);
    Bits maximum = {};
    for (int i = 0; i < whole; i += kLanes) {
      Bits bits;
      __builtin_memcpy(&bits, x + i, sizeof bits);
      bits &= 0x7fffffff;
      maximum = bits > maximum ? bits : maximum;
    }
    int32_t largest = 0;
    for (int j = 0; j < kLanes; ++j) largest = maximum[j] > largest ? maximum[j] : largest;
    const bool finite = largest < static_cast<int32_t>(kInfinityBits);
    for (int i = finite ? whole : 0; i < count; ++i) exact_add(x[i], word);
    if (!finite || largest == 0) continue;
    const int exponent = largest >> 23;
    const int absmin_high = exponent > kSpan ? exponent - kSpan + 1 : 1;
    const int absmin_low = absmin_high > kSpan ? absmin_high - kSpan : 1;
    // An exponent of 1 also covers subnormals.
    const int32_t above = absmin_high > 1 ? absmin_high << 23 : 1,
                  below = absmin_low > 1 ? absmin_low << 23 : 1;
    Doubles high = {}, low = {};
    Bits rest = {};
    for (int i = 0; i < whole; i += kLanes) {
      Bits bits;
      __builtin_memcpy(&bits, x + i, sizeof bits);
      const Bits magnitude = bits & 0x7fffffff;
      const Bits is_high = magnitude >= above, is_small = magnitude < below;
      high += __builtin_convertvector((Floats)(bits & is_high), Doubles);
      low += __builtin_convertvector((Floats)(bits & ~(is_high | is_small)), Doubles);
      rest |= magnitude & is_small;
    }
    double sum_high = 0.0, sum_low = 0.0;
    int32_t small = 0;
    for (int j = 0; j < kLanes; ++j) {
      sum_high += high[j];
      sum_low += low[j];
      small |= rest[j];
    }
    exact_add_units(sum_high, absmin_high - 1, word);
    exact_add_units(sum_low, absmin_low - 1, word);
    for (int i = 0; small != 0 && i < whole; ++i) {
      if (magnitude_bits(x[i]) < static_cast<uint32_t>(below)) exact_add(x[i], word);
    }
  }
}
#endif

/// Adds n squares, each rounded to float32 first.
LB_HD void exact_add_squares(const float* x, int n, int64_t* word) {
  constexpr int kChunk = 64;
  float square[kChunk];
  for (; n > 0; x += kChunk, n -= kChunk) {
    const int count = n < kChunk ? n : kChunk;
#if !defined(__CUDACC__)
    // Fast path: the sum of 64 terms whose exponents lie within 22 of each other is exact in double
    // (24 + 22 + 6 = 52 bits). Other terms take the general path.
    constexpr int kLanes = kExactLanes, kSpan = 22;
    using Floats = float __attribute__((vector_size(4 * kLanes)));
    using Bits = uint32_t __attribute__((vector_size(4 * kLanes)));
    using Doubles = double __attribute__((vector_size(8 * kLanes)));
    if (count == kChunk) {
      Bits maximum = {}, minimum = ~Bits{};
      Doubles sum = {};
      for (int i = 0; i < kChunk; i += kLanes) {
        Floats v;
        __builtin_memcpy(&v, x + i, sizeof v);
        v *= v;
        __builtin_memcpy(square + i, &v, sizeof v);
        const Bits bits = (Bits)v, below = bits - 1;  // zero becomes the largest
        maximum = bits > maximum ? bits : maximum;
        minimum = below < minimum ? below : minimum;
        sum += __builtin_convertvector(v, Doubles);
      }
      uint32_t largest = 0, smallest = ~0u;
      double total = 0.0;
      for (int j = 0; j < kLanes; ++j) {
        largest = maximum[j] > largest ? maximum[j] : largest;
        smallest = minimum[j] < smallest ? minimum[j] : smallest;
        total += sum[j];
      }
      if (largest == 0) continue;
      const int high = static_cast<int>(largest >> 23),
                low = static_cast<int>((smallest + 1) >> 23);
      if (largest < kInfinityBits && high - low <= kSpan) {
        const int position = low > 0 ? low - 1 : 0;
        // 239 is the highest position for which three words remain.
        exact_add_units(total, position < 239 ? position : 239, word);
        continue;
      }
    } else
#endif
      for (int i = 0; i < count; ++i) square[i] = x[i] * x[i];
    exact_add(square, count, word);
  }
}

}  // namespace lowbit
