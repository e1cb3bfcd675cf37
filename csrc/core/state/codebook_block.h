// codebook.h over many values, with the same codes and values. All maps share one function for each
// width in bits and instruction set. The functions have internal linkage, so each object of an
// instruction set has its own. They are not inlined into the formats, so many maps cost little
// code.
//
// quantize: the search of Codebook::quantize for a register of values at once. The rows of the tree
// of boundaries are in registers. The bits decided so far look up row l, and the comparison adds
// bit l. The first decided bit comes out lowest, so the bits of each byte are reversed at the end.
// Instruction sets without vector lookups use cells.h.
//
// dequantize: the map lies in registers, looked up by the code. Where it fills too many, plain
// loads.
//
// Included by codebook.h, at its end, and by nothing else.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/state/cells.h"
#include "core/state/chance/chance_vector.h"
#include "core/state/turns.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include "core/vector_avx512.h"
#elif defined(__AVX2__)
#include "core/vector_avx2.h"
#endif

namespace lowbit {

#if defined(__AVX2__)

/// The bits of a byte reversed, by its lower and its upper half.
template <int kBits>
struct TurnedBits {
  alignas(16) uint8_t lower[16] = {}, upper[16] = {};
  constexpr TurnedBits() {
    for (int half = 0; half < 16; ++half) {
      for (int b = 0; b < 4; ++b) {
        if (!((half >> b) & 1)) continue;
        if (b < kBits) lower[half] = static_cast<uint8_t>(lower[half] | 1 << (kBits - 1 - b));
        if (b + 4 < kBits) upper[half] = static_cast<uint8_t>(upper[half] | 1 << (kBits - 5 - b));
      }
    }
  }
};

template <class V, int kBits>
struct CodebookSearch {
  using Float = typename V::Float;
  using Int = typename V::Int;
  using Mask = typename V::Mask;
  static constexpr int kVectors = 4, kTurn = kVectors * V::kLanes;

  /// Looks up row kLevel of the tree at the bits so far; `decided` are these bits as masks.
  template <int kLevel>
  LB_HD static Float look_up(const float* row, Int answers, const Mask* decided) {
    if constexpr (kLevel == 0) {
      return V::all(row[0]);
    } else if constexpr (kLevel <= V::kLog2Table) {
      return V::template table<kLevel>(row, answers);
    } else {
      const Float low = look_up<kLevel - 1>(row, answers, decided);
      const Float high = look_up<kLevel - 1>(row + (1 << (kLevel - 1)), answers, decided);
      return V::choose(decided[kLevel - 1], low, high);
    }
  }

  template <int kLevel>
  LB_HD static void decide(const float* tree, const Float (&z)[kVectors], Int (&answers)[kVectors],
                           Mask (&decided)[kVectors][kBits]) {
    if constexpr (kLevel < kBits) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Float boundary = look_up<kLevel>(tree + (1 << kLevel), answers[v], decided[v]);
        decided[v][kLevel] = V::at_least(z[v], boundary);
        answers[v] = V::set(answers[v], decided[v][kLevel], 1 << kLevel);
      }
      decide<kLevel + 1>(tree, z, answers, decided);
    }
  }

  LB_HD static void turn(const float* x, Float inverse, const float* tree, uint8_t* codes) {
    Float z[kVectors];
    Int answers[kVectors];
    Mask decided[kVectors][kBits];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      z[v] = V::times(V::load(x + v * V::kLanes), inverse);
      answers[v] = V::zero();
    }
    decide<0>(tree, z, answers, decided);
    constexpr TurnedBits<kBits> kTurned;
    V::template store_bytes<(kBits > 4)>(answers, kTurned.lower, kTurned.upper, codes);
  }
};

/// codes[i] = book.quantize(x[i] * inverse)
template <int kBits>
__attribute__((noinline)) static void codebook_quantize(const float* x, float inverse,
                                                        const float* tree, uint8_t* codes, int n) {
  using Search = CodebookSearch<Vector, kBits>;
  const auto all = Vector::all(inverse);
  in_turns<Search::kTurn>(x, codes, n, [&](const float* some, uint8_t* out) LB_LAMBDA {
    Search::turn(some, all, tree, out);
  });
}

/// Evenly spaced codes by arithmetic, in steps of 2^-16: the upper half of a word is the code, the
/// lower half tells whether it is certain. Two roundings, that of the boundary and the conversion
/// err by less than three steps; within four of a boundary the search decides.
struct EvenCodes {
  float slope, offset;
  int last, lowest;  // lowest: the code of the smallest positive value
  Codebook book;
};
__attribute__((noinline)) static void even_quantize(const float* x, float inverse,
                                                    const EvenCodes& even, uint8_t* codes, int n) {
  constexpr int kTurn = 64, kUnsure = 8;
  const EvenCodes of = even;
  for (int i = 0; i < n; i += kTurn) {
    const int count = n - i < kTurn ? n - i : kTurn;
    alignas(64) float z[kTurn] = {};
    alignas(64) int32_t k[kTurn];
    if (count == kTurn) {
      for (int j = 0; j < kTurn; ++j) z[j] = x[i + j] * inverse;
    } else {
      for (int j = 0; j < count; ++j) z[j] = x[i + j] * inverse;
    }
    int32_t unsure = 0;
    for (int j = 0; j < kTurn; ++j) {
      k[j] = static_cast<int32_t>(z[j] * of.slope + of.offset);
      unsure |= (k[j] & 0xffff) - kUnsure;  // negative where it is less
    }
    alignas(64) int32_t code[kTurn];
    for (int j = 0; j < kTurn; ++j) {
      int32_t c = k[j] >> 16;
      c = c < of.last ? c : of.last;
      const int32_t least = z[j] > 0.0f ? of.lowest : 0;
      code[j] = c > least ? c : least;
    }
    for (int j = 0; unsure < 0 && j < kTurn; ++j) {
      if ((k[j] & 0xffff) < kUnsure) code[j] = static_cast<int32_t>(of.book.quantize(z[j]));
    }
    alignas(64) uint8_t bytes[kTurn];
    for (int j = 0; j < kTurn; ++j) bytes[j] = static_cast<uint8_t>(code[j]);
    std::memcpy(codes + i, bytes, static_cast<size_t>(count));
  }
}
__attribute__((noinline)) static void even_dequantize(const uint8_t* codes, int shift, int last,
                                                      float divisor, float scale, float* out,
                                                      int n) {
  for (int i = 0; i < n; ++i) {
    const int code = codes[i] < last ? codes[i] : last;
    out[i] = static_cast<float>(code + shift) / divisor * scale;
  }
}

/// codes[i] = book.quantize(x[i] * inverse), where words(z) are the places of values among the
/// codes in steps of 2^-16, plus one half and kUnsurePlace / 2 steps: the upper halves are the
/// codes. Places err by less than three steps.
constexpr int kUnsurePlace = 8;
template <class Words>
LB_HD void quantize_places(const float* x, float inverse, const Codebook& book, uint8_t* codes,
                           int n, const Words& words) {
  using V = Vector;
  const auto all = V::all(inverse);
  in_turns<4 * V::kLanes>(x, codes, n, [&](const float* some, uint8_t* out) LB_LAMBDA {
    typename V::Int code[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) code[v] = words(V::times(V::load(some + v * V::kLanes), all));
    V::store_upper(code, out);
    define_unsure<V, kUnsurePlace>(code, [&](int at) LB_LAMBDA {
      out[at] = static_cast<uint8_t>(book.quantize(some[at] * inverse));
    });
  });
}

}  // namespace lowbit

#include "core/state/dynamic_block.h"
#include "core/state/power_block.h"

namespace lowbit {

template <class F>
  requires IsCodebook<F>
LB_HD void quantize_block(F, const float* x, const typename F::Scale& scale, uint8_t* codes,
                          int n) {
  if constexpr (kEven<F>) {
    constexpr float kStep = 65536.0f;
    constexpr EvenCodes kCodes{F::Map::kDivisor * kStep,
                               0.5f * kStep + 4.0f - F::Map::kShift * kStep,
                               F::kCodes - 1,
                               F::kLowest,
                               {}};
    EvenCodes even = kCodes;
    even.book = F::book();
    even_quantize(x, scale.inverse, even, codes, n);
  } else if constexpr (kPowered<F>) {
    power_quantize<F::Map::kPower, F::kSigned>(x, scale.inverse, power_line<F>(), codes, n);
  } else if constexpr (kDecades<F> && F::kBits > 5) {  // a search of 5 bits is shorter
    dynamic_quantize<F::kSigned>(x, scale.inverse, kDynamicLines<typename F::Map>, F::book(), codes,
                                 n);
  } else {
    codebook_quantize<F::kBits>(x, scale.inverse, F::book().tree, codes, n);
  }
}

#else

template <class Map>
static constexpr auto kCellTable = [] {
  constexpr CodebookTable<Map> kTable;
  constexpr int kBinades = cell_binades(kTable.value, Map::kCodes, Map::kSigned);
  return CellTable<Map::kBits, Map::kSigned, kBinades>(kTable.value, Map::kCodes);
}();

template <class F>
  requires IsCodebook<F>
LB_HD void quantize_block(F, const float* x, const typename F::Scale& scale, uint8_t* codes,
                          int n) {
  constexpr const auto& kTable = kCellTable<typename F::Map>;
  static_assert(kTable.exact);
  quantize_cells(x, scale.inverse, kTable.cells(), codes, n);
}

#endif

/// out[i] = value[codes[i]] * scale
template <int kBits>
__attribute__((noinline)) static void codebook_dequantize(const uint8_t* codes, float scale,
                                                          const float* value, float* out, int n) {
  int i = 0;
#if defined(__AVX2__)
  using V = Vector;
  if constexpr (kBits <= V::kLog2Dequantized) {
    const auto all = V::all(scale);
    for (; i + V::kLanes <= n; i += V::kLanes) {
      V::store(out + i,
               V::times(V::template dequantize<kBits>(value, V::load_bytes(codes + i)), all));
    }
  }
#endif
  // Eight at a time by hand: compilers would move codes into vectors and out of them again.
  for (; i + 8 <= n; i += 8) {
    const float v[8] = {value[codes[i]],     value[codes[i + 1]], value[codes[i + 2]],
                        value[codes[i + 3]], value[codes[i + 4]], value[codes[i + 5]],
                        value[codes[i + 6]], value[codes[i + 7]]};
    for (int j = 0; j < 8; ++j) out[i + j] = v[j] * scale;
  }
  for (; i < n; ++i) out[i] = value[codes[i]] * scale;
}

template <class F>
  requires IsCodebook<F>
LB_HD void dequantize_block(F, const uint8_t* codes, const typename F::Scale& scale, float* out,
                            int n) {
#if defined(__AVX2__)
  if constexpr (kEven<F>) {
    even_dequantize(codes, F::Map::kShift, F::kCodes - 1, F::Map::kDivisor, scale.scale, out, n);
    return;
  }
  if constexpr (kPowered<F>) {
    power_dequantize<F::Map::kPower, F::kSigned>(codes, power_line<F>(), scale.scale, out, n);
    return;
  }
#endif
  codebook_dequantize<F::kBits>(codes, scale.scale, F::book().value, out, n);
}

}  // namespace lowbit

#if defined(__AVX2__)
#include "core/state/chance/codebook_chance.h"
#endif
