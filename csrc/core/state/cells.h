// Nearest codes by one table lookup per value: exact, in plain loops for any processor.
//
// A cell is a range of floats with the same sign, exponent and first bits of the mantissa; a shift
// of the value's bits gives its number. Cells are so narrow that no two boundaries between codes
// lie in one. The table entry of a cell is therefore a number that is added to the bits of the
// value: from the boundary on, the sum carries into the next code.
//
//   key    bits(|z|) - bits(lowest) with |z| clamped to [lowest, highest], its complement below
//          zero; counted from the lowest cell on
//   code   (entry[key >> kShift] + key) >> kShift
//   entry  ((the code below the boundary, plus 1) << kShift) - (the boundary's key)
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/state/boundary.h"

namespace lowbit {

/// The cells of a map of this width with values between -1 and 1.
template <int kBits, bool kSigned>
struct Cells {
  // Mantissa bits of a cell number.
  static constexpr int kFine = kBits - 1 - kSigned, kShift = 23 - kFine;
  static constexpr uint32_t kOne = 127u << 23;
  const uint32_t* entry;
  float zero;             // the smallest value that is not below zero
  float lowest, highest;  // magnitudes: every boundary but one at zero lies between them
  // The key of zero. Unsigned maps have one cell below it, signed ones half of all cells.
  uint32_t first;

  LB_HD constexpr uint32_t key(float z) const {
    const float a = kSigned ? bits_float(magnitude_bits(z)) : z;
    const float raised = a > lowest ? a : lowest, kept = raised < highest ? raised : highest;
    // Unsigned maps compare words, so processors that flush subnormals to zero give the same codes.
    const bool under =
        kSigned ? z < zero
                : static_cast<int32_t>(float_bits(z)) < static_cast<int32_t>(float_bits(zero));
    const uint32_t up = float_bits(kept) - float_bits(lowest), below = under ? ~0u : 0;
    return (kSigned ? up ^ below : up | below) + first;
  }
  LB_HD constexpr uint8_t code(uint32_t key) const {
    return static_cast<uint8_t>((entry[key >> kShift] + key) >> kShift);
  }
};

/// The number of binades below 1 that contain a boundary, other than one at zero, or begin with
/// one.
constexpr int cell_binades(const float* value, int codes, bool is_signed) {
  uint32_t minimum = kInfinityBits;
  for (int k = 1; k < codes; ++k) {
    const uint32_t b = magnitude_bits(first_of_entry(value, k, is_signed));
    if (b > 1 && b < minimum) minimum = b;
  }
  return 127 - static_cast<int>((minimum - 1) >> 23);
}

template <int kBits, bool kSigned, int kBinades>
struct CellTable {
  using Of = Cells<kBits, kSigned>;
  static constexpr uint32_t kAbove = static_cast<uint32_t>(kBinades) << Of::kFine,
                            kBelow = kSigned ? kAbove : 1;
  uint32_t entry[kBelow + kAbove] = {};
  float zero = 0.0f;
  bool exact = true;  // every boundary lies in a cell, and no two lie in the same one

  constexpr CellTable(const float* value, int codes) {
    uint32_t boundary[1 << kBits] = {};
    for (int k = 1; k < codes; ++k) {
      const float b = first_of_entry(value, k, kSigned);
      if (magnitude_bits(b) <= 1) zero = b;
      const float a = bits_float(magnitude_bits(b));
      exact = exact && a < cells().highest && (b == zero || a > cells().lowest);
    }
    for (int k = 1; k < codes; ++k) boundary[k] = cells().key(first_of_entry(value, k, kSigned));
    int next = 1;
    for (uint32_t cell = 0; cell < kBelow + kAbove; ++cell) {
      const uint32_t begin = cell << Of::kShift, end = (cell + 1) << Of::kShift;
      while (next < codes && boundary[next] <= begin) ++next;
      const bool inside = next < codes && boundary[next] < end;
      entry[cell] = (static_cast<uint32_t>(next) << Of::kShift) - (inside ? boundary[next] : end);
      exact = exact && !(inside && next + 1 < codes && boundary[next + 1] < end);
    }
  }
  constexpr Of cells() const {
    const uint32_t lowest = Of::kOne - (static_cast<uint32_t>(kBinades) << 23);
    return {entry, zero, bits_float(lowest), bits_float(Of::kOne - 1), kBelow << Of::kShift};
  }
};

template <class Cells>
LB_HD void quantize_turn(const Cells& cells, const float* x, float inverse, uint8_t* codes, int n) {
  uint32_t key[64];
  for (int i = 0; i < n; ++i) key[i] = cells.key(x[i] * inverse);
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    const uint32_t* const from = key + i;
    uint8_t* const to = codes + i;
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) to[j] = cells.code(from[j]);
  }
  for (; i < n; ++i) codes[i] = cells.code(key[i]);
}

#if defined(__clang__)
#define LB_APART __attribute__((noinline)) static
#else
#define LB_APART __attribute__((noinline, noclone)) static
#endif

/// codes[i] = the code of x[i] * inverse. A NaN gets an arbitrary code; blocks with codes have
/// none. All maps of a width share one function: with constant limits, g++ would compile the clamp
/// to more than a maximum and a minimum.
template <int kBits, bool kSigned>
LB_APART void quantize_cells(const float* x, float inverse, const Cells<kBits, kSigned>& shared,
                             uint8_t* codes, int n) {
  const Cells<kBits, kSigned> cells = shared;  // a local copy, which the stores below cannot alias
  int i = 0;
  for (; i + 64 <= n; i += 64) quantize_turn(cells, x + i, inverse, codes + i, 64);
  if (i < n) quantize_turn(cells, x + i, inverse, codes + i, n - i);
}

#undef LB_APART

}  // namespace lowbit
