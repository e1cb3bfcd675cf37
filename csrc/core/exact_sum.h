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
#if !defined(__CUDACC__)
#include "core/sum_vector.h"
#endif

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

/// The same where most words carry nothing: the chain of additions through all words is then only
/// predicted, and takes no time.
LB_HD void exact_carry_few(int64_t* word) {
  for (int i = 0; i + 1 < ExactSum::kBins; ++i) {
    const int64_t carried = word[i] >> 16;
    if (carried == 0) continue;
    word[i + 1] += carried;
    word[i] &= 0xffff;
  }
}

/// Adds the sums of n columns, each of up to `rows` terms since its last carry, and carries.
LB_HD void exact_merge_columns(const int64_t* columns, int64_t n, int64_t rows, int64_t* word) {
  int64_t terms = 0;
  for (int64_t c = 0; c < n; ++c) {
    if ((terms += rows) > ExactSum::kRoom) exact_carry(word), terms = rows;
    exact_merge(columns + c * ExactSum::kWords, word);
  }
  exact_carry(word);
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

#if defined(__CUDACC__)
LB_HD double exact_value(const int64_t* word) {
  int64_t digit[ExactSum::kBins];
  return exact_value(word, digit);
}
#else
/// The same in fewer instructions where the words are canonical and the sum is at least 2^-85.
LB_HD double exact_value(const int64_t* word) {
  uint64_t any = 0;
  for (int k = 0; k < ExactSum::kBins; ++k) any |= static_cast<uint64_t>(word[k]);
  int i = ExactSum::kBins - 1;
  while (i > 4 && word[i] == 0) --i;
  if (any >> 16 != 0 || word[i] == 0 || word[ExactSum::kNonFinite] != 0) {
    int64_t digit[ExactSum::kBins];
    return exact_value(word, digit);
  }
  uint64_t top = 0;
  for (int k = 0; k < 4; ++k) top = top << 16 | static_cast<uint64_t>(word[i - k]);
  // The highest 64 bits without the last one, which any nonzero bit below sets.
  const int more = __builtin_clzll(top);
  const auto next = static_cast<uint64_t>(word[i - 4]);
  top = top << more | next >> (16 - more);
  uint64_t below = (top & 1) | (next & ((1ull << (16 - more)) - 1));
  for (int k = i - 5; k >= 0; --k) below |= static_cast<uint64_t>(word[k]);
  top = top >> 1 | (below != 0);
  return static_cast<double>(static_cast<int64_t>(top)) * power_of_two(16 * i - 196 - more);
}
#endif

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
/// The sum of the terms in a window of magnitudes of n terms, n a multiple of the lanes.
struct WindowSum {
  double sum;
  bool all;  // whether no term but zeros is below the window
};
/// kTop: the window has no upper end.
template <bool kTop>
LB_HD WindowSum window_sum(const float* x, int n, int32_t lower, int32_t upper) {
  using V = SumVector;
  const V::Bits from = V::before(lower), to = V::before(upper);
  V::Sums sums{}, more{};     // two chains of additions, each of which waits for itself
  V::Bits below = V::all(0);  // magnitudes below the window, by or
  const auto take = [&](int i, V::Sums& into) {
    const V::Bits bits = V::load(x + i), magnitude = V::magnitude(bits);
    const V::Mask taken = V::greater(magnitude, from);
    V::add(into, bits, kTop ? taken : V::without(taken, V::greater(magnitude, to)));
    below = V::join_others(below, taken, magnitude);
  };
  int i = 0;
  for (; i + 2 * V::kLanes <= n; i += 2 * V::kLanes) take(i, sums), take(i + V::kLanes, more);
  if (i < n) take(i, sums);
  return {V::total(sums) + V::total(more), V::largest(below) == 0};
}

/// Adds n terms, in chunks of 256. The sum of 256 terms whose exponents lie within 21 of each other
/// is exact in double, in any order (24 + 20 + 8 = 52 bits). A chunk is such a sum over the upper
/// 21 exponents below its largest, and where there are smaller terms another one over the lower 21.
/// What is smaller still is added term by term.
LB_HD void exact_add(const float* x, int n, int64_t* word) {
  using V = SumVector;
  constexpr int kChunk = 256, kSpan = 21;
  for (; n > 0; x += kChunk, n -= kChunk) {
    const int count = n < kChunk ? n : kChunk, whole = count & ~(V::kLanes - 1);
    V::Bits maximum = V::all(0);
    for (int i = 0; i < whole; i += V::kLanes)
      maximum = V::max(maximum, V::magnitude(V::load(x + i)));
    const int32_t largest = V::largest(maximum);
    const bool finite = largest < static_cast<int32_t>(kInfinityBits);
    for (int i = finite ? whole : 0; i < count; ++i) exact_add(x[i], word);
    if (!finite || largest == 0) continue;
    const int exponent = largest >> 23;
    const int absmin_high = exponent > kSpan ? exponent - kSpan + 1 : 1;
    const int absmin_low = absmin_high > kSpan ? absmin_high - kSpan : 1;
    // An exponent of 1 also covers subnormals.
    const int32_t above = absmin_high > 1 ? absmin_high << 23 : 1,
                  below = absmin_low > 1 ? absmin_low << 23 : 1;
    const WindowSum high = window_sum<true>(x, whole, above, 0);
    exact_add_units(high.sum, absmin_high - 1, word);
    if (high.all) continue;
    const WindowSum low = window_sum<false>(x, whole, below, above);
    exact_add_units(low.sum, absmin_low - 1, word);
    for (int i = 0; !low.all && i < whole; ++i) {
      const uint32_t bits = magnitude_bits(x[i]);
      if (bits != 0 && bits < static_cast<uint32_t>(below)) exact_add(x[i], word);
    }
  }
}

#if defined(__AVX512F__)
constexpr int kExactLanes = 8;
#else
constexpr int kExactLanes = 4;  // compilers split vectors where registers are shorter
#endif
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
