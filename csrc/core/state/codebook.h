// Codes of 2 to 8 bits into a table of values in ascending order. A code is the nearest entry.
//
// Boundary k is the smallest float whose code is k or higher. If the exact middle of two entries is
// a float, it is the boundary, since a tie goes to the larger value. So
//
//   code = number of boundaries <= z
//
// is the nearest entry by construction, without arithmetic on z. Unsigned maps with a zero have the
// smallest positive float as their first boundary: a positive value never becomes zero.
//
// A map is a type with kBits, kSigned, kCodes (the number of entries; a last code may be unused)
// and a compile-time fill(value). All maps share everything else, and all maps of one width share
// the loops over many values (codebook_block.h).
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/scale/block.h"
#include "core/state/boundary.h"

#if !defined(LB_TABLE)
#if defined(__CUDACC__)
#define LB_TABLE __device__ const
#else
#define LB_TABLE constexpr
#endif
#endif

namespace lowbit {

/// The entries of a map whose values are evenly spaced: (code + kShift) / kDivisor.
template <class Map>
constexpr void fill_evenly(float* value) {
  for (int q = 0; q < Map::kCodes; ++q)
    value[q] = static_cast<float>(q + Map::kShift) / static_cast<float>(Map::kDivisor);
}

template <class Map>
struct CodebookTable {
  static constexpr int kEntries = 1 << Map::kBits;
  alignas(64) float value[kEntries] = {};     // unused codes repeat the last entry
  alignas(64) float boundary[kEntries] = {};  // [0]: -infinity; unused codes: NaN, never reached
  // The boundaries as a search tree. Row l has 2^l boundaries, from [2^l] on, which decide bit l
  // counted from the top. The bits decided before select the boundary, the first one lowest, so
  // every result is already in place for the next lookup. There is room for a register after the
  // last row.
  alignas(64) float tree[kEntries + 16] = {};
  uint32_t zero = 0;  // code of z = 0

  constexpr CodebookTable() {
    Map::fill(value);
    for (int k = Map::kCodes; k < kEntries; ++k) value[k] = value[Map::kCodes - 1];
    boundary[0] = -bits_float(kInfinityBits);
    for (int k = 1; k < kEntries; ++k) {
      boundary[k] =
          k < Map::kCodes ? first_of_entry(value, k, Map::kSigned) : bits_float(kCanonicalNan);
    }
    for (int k = 1; k < Map::kCodes; ++k) zero += boundary[k] <= 0.0f;
    for (int l = 0; l < Map::kBits; ++l) {
      for (int prefix = 0; prefix < 1 << l; ++prefix) {
        int reversed = 0;
        for (int b = 0; b < l; ++b) reversed |= ((prefix >> b) & 1) << (l - 1 - b);
        tree[(1 << l) + reversed] = boundary[(2 * prefix + 1) << (Map::kBits - 1 - l)];
      }
    }
  }
};

/// The table of one map.
struct Codebook {
  const float* value;
  const float* boundary;
  const float* tree;
  int bits, count;
  uint32_t zero;

  LB_HD float dequantize(uint32_t code) const { return value[code]; }
  LB_HD uint32_t quantize(float z) const {
    uint32_t code = 0;
    for (uint32_t step = 1u << (bits - 1); step != 0; step >>= 1) {
      code += z >= boundary[code + step] ? step : 0;
    }
    return code;
  }
};

template <class Map>
static LB_TABLE CodebookTable<Map> kCodebookTable{};

template <class M>
struct CodebookFormat {
  using Map = M;
  static constexpr const char* kDtype = "uint8";
  static constexpr const char* kDomain = "linear";
  static constexpr int kBits = Map::kBits, kBlock = Map::kBits == 8 ? 256 : 128;
  // The number of codes: codes from here on are never written.
  static constexpr int kCodes = Map::kCodes;
  static constexpr bool kScaled = true, kSigned = Map::kSigned;
  static constexpr uint32_t kZeroCode = CodebookTable<Map>{}.zero;
  static constexpr bool kCodebook = true;
  using Storage = uint8_t;
  using Scale = BlockScale;

  LB_HD static Codebook book() {
    const auto& t = kCodebookTable<Map>;
    return {t.value, t.boundary, t.tree, kBits, kCodes, kZeroCode};
  }
  LB_HD static float dequantize(uint32_t code) { return kCodebookTable<Map>.value[code]; }
  LB_HD static uint32_t quantize(float z) { return book().quantize(z); }
  LB_HD static constexpr uint32_t neighbour(uint32_t code, bool up) {
    if (up) return code + 1 < kCodes ? code + 1 : code;
    return code > kLowest ? code - 1 : code;
  }
  /// The lowest unsigned code that stochastic rounding may write: codes never become zero.
  static constexpr uint32_t kLowest = !kSigned && CodebookTable<Map>{}.value[0] == 0.0f ? 1 : 0;
};

template <class F>
concept IsCodebook = F::kCodebook;
/// Evenly spaced codes of more than 4 bits: computed where vectors have lookups of fewer entries.
template <class F>
constexpr bool kEven = F::kBits > 4 && requires { F::Map::kDivisor; };

/// Powers of evenly spaced numbers, of as many bits: computed too.
template <class F>
constexpr bool kPowered = F::kBits > 4 && !kEven<F> && requires { F::Map::kPower; };
/// Decades of evenly spaced numbers, of as many bits: on lines.
template <class F>
constexpr bool kDecades = F::kBits > 4 && requires { F::Map::kDynamic; };

}  // namespace lowbit

#if !defined(__CUDACC__)
#include "core/state/codebook_block.h"
#endif
