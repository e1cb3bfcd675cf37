// Nearest codes on the device by one lookup for a value, as core/state/cells.h does on a CPU.
//
// A cell is a range of 2^16 neighboring floats; the upper half of a float names it. No two
// boundaries between codes lie in one. With a = max(|z|, the lowest cell), the highest byte of
//
//     sum = (bits(a) << 7) + entry[cell] + (z > 0)
//
// counts the boundaries that |z| has passed. A boundary that is the exact middle of two values
// belongs to z > 0 only, since a tie goes to the larger value: there the sum is one short of the
// next byte.
//
//   unsigned   the code is the highest byte. A positive value never gets the code 0 of a zero, so
//              entries begin at code 1 there, and a zero gets code 0 afterwards.
//   signed     entries begin at the code of zero. With the highest byte c, negative values have the
//              code 2 zero - c.
//   8-bit floats: the highest byte is the magnitude. A tie goes to the even one, whatever the sign.
#pragma once

#include "core/state/boundary.h"
#include "cuda/arithmetic.cuh"
#include "cuda/step/codes.cuh"

namespace lowbit::cuda {

/// A map of `kCodes` values in ascending order.
template <int kCodes>
struct MapValues {
  float at[kCodes];
};
/// 8-bit floats with a sign, or without.
template <class F>
constexpr bool kIsFloat = __is_same(F, Float8E4M3) || __is_same(F, Float8E4M3Unsigned);

template <class F>
constexpr auto values_of() {
  MapValues<1 << F::kBits> values{};
  if constexpr (kIsFloat<F>) {  // of magnitudes; 0x7f is NaN
    for (int k = 0; k < 0x7f; ++k) {
      const int exponent = k >> 3, mantissa = k & 7;
      double value = exponent > 0 ? 8 + mantissa : mantissa;
      for (int e = exponent > 0 ? exponent : 1; e < 10; ++e) value /= 2;
      for (int e = exponent; e > 10; --e) value *= 2;
      values.at[k] = static_cast<float>(value);
    }
  } else if constexpr (IsCodebook<F>) {
    static_assert(F::kCodes == 1 << F::kBits);
    constexpr CodebookTable<typename F::Map> kTable;
    for (int k = 0; k < F::kCodes; ++k) values.at[k] = kTable.value[k];
  } else {
    constexpr auto kTable = make_code_tables<F::kSigned ? 0 : 1>();
    for (int k = 0; k < 256; ++k) values.at[k] = kTable.value[k];
  }
  return values;
}

template <class F>
struct CellsOf {
  static constexpr int kCodes = kIsFloat<F> ? 0x7f : 1 << F::kBits, kShift = 7;
  static constexpr auto kValues = values_of<F>();
  /// Whether negative values mirror positive ones around the code of zero.
  static constexpr bool kMirrored = F::kSigned && !kIsFloat<F>;
  static constexpr int kZero = kMirrored ? static_cast<int>(F::kZeroCode) : 0;
  /// Whether a positive value never gets the code 0.
  static constexpr bool kPositive = !F::kSigned && kValues.at[0] == 0.0f;
  static constexpr int kFirst = kZero + 1 + kPositive;
  static constexpr float kMostNegative = -kValues.at[0], kTop = kValues.at[kCodes - 1];

  static constexpr double middle(int code) {
    return (static_cast<double>(kValues.at[code - 1]) + kValues.at[code]) / 2;
  }
  /// The smallest |z| > 0 whose code is `code` or more.
  static constexpr uint32_t boundary(int code) {
    const uint32_t b = float_bits(first_of_entry(kValues.at, code, true));
    return b + (kIsFloat<F> && code % 2 == 1 && middle(code) == bits_float(b));
  }
  static constexpr uint32_t kLowest = (boundary(kFirst) - 1) >> 16;  // the first cell
  static constexpr uint32_t kCells = (float_bits(kTop) >> 16) - kLowest + 1;

  static constexpr bool exact() {
    for (int k = kFirst + 1; k < kCodes; ++k) {
      if (boundary(k) >> 16 == boundary(k - 1) >> 16) return false;
    }
    for (int k = 1; kMirrored && k <= kZero; ++k) {
      if (kValues.at[kZero - k] != -kValues.at[kZero + k]) return false;
    }
    return boundary(kCodes - 1) >> 16 < float_bits(kTop) >> 16;
  }
};

template <class F>
struct CellEntries {
  uint32_t at[CellsOf<F>::kCells];
};
template <class F>
constexpr CellEntries<F> make_cells() {
  using Of = CellsOf<F>;
  static_assert(Of::exact());
  CellEntries<F> t{};
  int code = Of::kFirst - 1;  // where the cell begins
  for (uint32_t i = 0; i < Of::kCells; ++i) {
    const uint32_t cell = Of::kLowest + i;
    const int next = code + 1;
    const uint32_t at = next < Of::kCodes ? Of::boundary(next) : 0;
    if (at >> 16 == cell) {
      const bool tie = Of::kMirrored && Of::middle(next) == bits_float(at);
      t.at[i] = (static_cast<uint32_t>(next) << 24) - (at << Of::kShift) - tie;
      code = next;
    } else {
      t.at[i] =
          (static_cast<uint32_t>(code) << 24) + (1u << 23) - ((cell << 16 | 0x8000u) << Of::kShift);
    }
  }
  return t;
}

template <class F>
static LB_TABLE CellEntries<F> kCellEntries = make_cells<F>();

template <class F>
struct CellTables {
  float value[1 << F::kBits];
  CellEntries<F> cells;
};

template <class F>
struct CellCode {
  using Of = CellsOf<F>;
  using Tables = CellTables<F>;

  static __device__ __forceinline__ void fill(Tables& t, int thread, int threads) {
    LB_UNROLL(1)
    for (uint32_t i = static_cast<uint32_t>(thread); i < Of::kCells;
         i += static_cast<uint32_t>(threads))
      t.cells.at[i] = kCellEntries<F>.at[i];
    LB_UNROLL(1)
    for (int i = thread; i < 1 << F::kBits; i += threads) {
      if constexpr (kIsFloat<F>) {
        t.value[i] = F::dequantize(static_cast<uint32_t>(i));
      } else if constexpr (IsCodebook<F>) {
        t.value[i] = kBooks.value[kBookOffset<F> + i];
      } else if constexpr (F::kSigned) {
        t.value[i] = kSignedTables.value[i];
      } else {
        t.value[i] = kUnsignedTables.value[i];
      }
    }
  }

  static __device__ __forceinline__ uint32_t lookup(float a, const Tables& t) {
    const auto* cells = reinterpret_cast<const char*>(t.cells.at);
    const uint32_t bits = float_bits(a);
    const uint32_t entry =
        *reinterpret_cast<const uint32_t*>(cells + (upper_half_times_4(bits) - 4 * Of::kLowest));
    return (bits << Of::kShift) + entry;
  }

  /// The codes of z, a byte each, in two words; of mirrored maps the codes of -z. A NaN gets an
  /// arbitrary code.
  static __device__ __forceinline__ void quantize(const float (&z)[8], const Tables& t,
                                                  uint32_t (&bytes)[2]) {
    constexpr float kLowest = bits_float(Of::kLowest << 16);
    uint32_t sum[8], sign[8];
    for (int e = 0; e < 8; ++e) {
      float negated = z[e];
      if constexpr (Of::kMirrored) negated = fminf(z[e], Of::kMostNegative);
      sign[e] = float_bits(negated);
      sum[e] = lookup(fmaxf(F::kSigned ? fabsf(negated) : negated, kLowest), t);
      if constexpr (Of::kMirrored) sum[e] += sign[e] >> 31;
    }
    for (int i = 0; i < 2; ++i) {
      bytes[i] = top_bytes(sum + 4 * i);
      if constexpr (Of::kMirrored) {
        constexpr uint32_t kTurn = (255u - 2 * Of::kZero) * 0x01010101u;
        const uint32_t negative = ~sign_bytes(sign + 4 * i);
        bytes[i] = (bytes[i] ^ negative) - (negative & kTurn);
      } else if constexpr (F::kSigned) {  // the sign of codes that are not 0
        const uint32_t some = bytes[i] + 0x7f7f7f7fu;
        bytes[i] |= some & sign_bytes(sign + 4 * i) & 0x80808080u;
      } else if constexpr (Of::kPositive) {
        // Rarely: some byte is 1, which may stand for a zero.
        const uint32_t others = bytes[i] ^ 0x01010101u;
        if (((others - 0x01010101u) & ~others & 0x80808080u) != 0) {
          for (int e = 0; e < 4; ++e) {
            // A variable of its own: g++ 12's sanitizer of shifts reads another z otherwise.
            const uint32_t is_zero = z[4 * i + e] > 0.0f ? 0 : 1;
            bytes[i] -= is_zero << (8 * e);
          }
        }
      }
    }
  }
};

}  // namespace lowbit::cuda
