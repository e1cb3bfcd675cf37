// Stochastic codes of codebook.h, with the codes of stochastic.h, for many values at once.
//
// A search as that of codebook_block.h, over the entries instead of the boundaries, finds the entry
// below a value. Its share of the way to the next entry, in steps of 2^-16, is two lookups, a
// difference and a product. dynamic8_chance.h says how the share and the random bits decide. The
// share errs by a small part of a step, so that values are unsure in the two steps about a decision
// only: the scalar definition is asked there.
//
// Evenly spaced entries need no search: code and share are one product and sum.
//
// Included by codebook_block.h, at its end, and by nothing else.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/state/chance/chance_vector.h"
#include "core/state/chance/stochastic.h"

namespace lowbit {

/// A map for stochastic_code.
struct BookOfChance {
  Codebook book;
  uint32_t last, lowest;
  bool is_signed;

  LB_HD float dequantize(uint32_t code) const { return book.dequantize(code); }
  LB_HD uint32_t quantize(float z) const { return book.quantize(z); }
  LB_HD uint32_t neighbour(uint32_t code, bool up) const {
    if (up) return code < last ? code + 1 : code;
    return code > lowest ? code - 1 : code;
  }
  LB_HD uint8_t code_of(float z, uint32_t random16) const {
    return static_cast<uint8_t>(
        stochastic_code(*this, is_signed, BlockScale{1.0f, 1.0f, true}, z, z, random16));
  }
};
template <class F>
LB_HD BookOfChance book_of_chance() {
  return {F::book(), F::kCodes - 1, F::kLowest, F::kSigned};
}

/// The entries as a search tree, and by the answers of the search: the entry and the steps per unit
/// from there to the next one.
template <class Map>
struct ChanceTable {
  static constexpr int kBits = Map::kBits, kEntries = 1 << kBits;
  alignas(64) float tree[kEntries + 16] = {}, entry[kEntries + 16] = {}, rate[kEntries + 16] = {};

  constexpr ChanceTable() {
    float value[kEntries] = {};
    Map::fill(value);
    const bool zero = !Map::kSigned && value[0] == 0.0f;  // positive values are never below entry 1
    for (int l = 0; l < kBits; ++l) {
      for (int prefix = 0; prefix < 1 << l; ++prefix) {
        const int k = (2 * prefix + 1) << (kBits - 1 - l);
        tree[(1 << l) + reversed(prefix, l)] = k >= Map::kCodes ? bits_float(kCanonicalNan)
                                               : k == 1 && zero ? bits_float(1)
                                                                : value[k];
      }
    }
    for (int k = 0; k < Map::kCodes; ++k) {
      const int at = reversed(k, kBits);
      entry[at] = value[k];
      const bool moves = k + 1 < Map::kCodes && !(k == 0 && zero);
      if (moves)
        rate[at] = static_cast<float>(65536.0 / (static_cast<double>(value[k + 1]) - value[k]));
    }
  }

 private:
  static constexpr int reversed(int x, int bits) {
    int out = 0;
    for (int b = 0; b < bits; ++b) out |= ((x >> b) & 1) << (bits - 1 - b);
    return out;
  }
};
template <class Map>
static constexpr ChanceTable<Map> kChanceTable{};

/// Codes of 32 (or 64) values of a map; `least` as in dynamic8_chance.h.
template <class V, int kBits>
struct CodebookChance : CodebookSearch<V, kBits> {
  using Search = CodebookSearch<V, kBits>;
  using typename Search::Float;
  using typename Search::Int;
  static constexpr int kVectors = Search::kVectors, kTurn = Search::kTurn, kUnsure = 4;

  LB_HD static void turn(const float* x, Float inverse, const float* tree, const float* entry,
                         const float* rate, const uint16_t* random16, Int (&least)[4],
                         uint8_t* codes) {
    static_assert(kVectors == 4);
    Float z[kVectors];
    Int answers[kVectors];
    typename Search::Mask decided[kVectors][kBits];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      z[v] = V::times(V::load(x + v * V::kLanes), inverse);
      answers[v] = V::zero();
    }
    Search::template decide<0>(tree, z, answers, decided);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Float begin = V::template dequantize<kBits>(entry, answers[v]),
                  per_unit = V::template dequantize<kBits>(rate, answers[v]);
      const Int share =
          V::rounded(V::larger(V::times(V::minus(z[v], begin), per_unit), V::all(0.0f)));
      const Int sum = add_chance<kUnsure, V>(share, share, random16 + v * V::kLanes, least[v]);
      answers[v] = V::mark(answers[v], sum);
    }
    constexpr TurnedBits<kBits> kTurned;
    V::template store_marked<(kBits > 4)>(answers, kTurned.lower, kTurned.upper, codes);
  }
};

/// codes[i] = book.code_of(x[i] * inverse, random16[i])
template <int kBits>
__attribute__((noinline)) static void codebook_by_chance(
    const float* x, float inverse, const float* tree, const float* entry, const float* rate,
    const BookOfChance& book, const uint16_t* random16, uint8_t* codes, int n) {
  using Chance = CodebookChance<Vector, kBits>;
  constexpr int kTurn = Chance::kTurn;
  const auto all = Vector::all(inverse);
  int i = 0;
  for (; i + kTurn <= n; i += kTurn) {
    Vector::Int least[4];
    Chance::turn(x + i, all, tree, entry, rate, random16 + i, least, codes + i);
    define_unsure<Vector, Chance::kUnsure>(least, [&](int at) LB_LAMBDA {
      codes[i + at] = book.code_of(x[i + at] * inverse, random16[i + at]);
    });
  }
  for (; i < n; ++i) codes[i] = book.code_of(x[i] * inverse, random16[i]);
}

/// codes[i] = book.code_of(x[i] * inverse, random16[i]), where place(z, near) is the place of
/// values among the codes, and `near` as add_chance takes it. Places err by less than three steps.
template <class Place>
LB_HD void places_by_chance(const float* x, float inverse, const BookOfChance& book,
                            const uint16_t* random16, uint8_t* codes, int n, const Place& place) {
  using V = Vector;
  constexpr int kTurn = 4 * V::kLanes;
  const auto all = V::all(inverse);
  int i = 0;
  for (; i + kTurn <= n; i += kTurn) {
    typename V::Int sum[4], least[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      typename V::Int near;
      const auto position = place(V::times(V::load(x + i + v * V::kLanes), all), near);
      sum[v] = add_chance<kUnsurePlace, V>(position, near, random16 + i + v * V::kLanes, least[v]);
    }
    V::store_upper(sum, codes + i);
    define_unsure<V, kUnsurePlace>(least, [&](int at) LB_LAMBDA {
      codes[i + at] = book.code_of(x[i + at] * inverse, random16[i + at]);
    });
  }
  for (; i < n; ++i) codes[i] = book.code_of(x[i] * inverse, random16[i]);
}

/// The same for evenly spaced codes.
struct LineOfChance {
  float slope, offset, last, lowest;
};
__attribute__((noinline)) static void even_by_chance(const float* x, float inverse,
                                                     const LineOfChance& line,
                                                     const BookOfChance& book,
                                                     const uint16_t* random16, uint8_t* codes,
                                                     int n) {
  using V = Vector;
  const auto slope = V::all(line.slope), offset = V::all(line.offset), last = V::all(line.last),
             lowest = V::all(line.lowest);
  places_by_chance(x, inverse, book, random16, codes, n, [&](V::Float z, V::Int& near) LB_LAMBDA {
    // Limited to [0, last], and to `lowest` and more where z is positive.
    return near = V::rounded(V::larger(V::smaller(V::plus_product(z, slope, offset), last),
                                       V::where_positive(z, lowest)));
  });
}

}  // namespace lowbit

#include "core/state/chance/dynamic_chance.h"
#include "core/state/chance/power_chance.h"

namespace lowbit {

/// Whether codes are evenly spaced, also those of few bits.
template <class F>
constexpr bool kOnLine = requires { F::Map::kDivisor; };
/// Whether power_chance.h computes codes: those of few bits where no root is taken.
template <class F>
constexpr bool kByPower = [] {
  if constexpr (requires { F::Map::kPower; }) {
    return F::kBits > 4 || F::Map::kPower == 1;
  }
  return false;
}();

template <class F>
  requires IsCodebook<F> &&
           (kOnLine<F> || kByPower<F> || kDecades<F> || F::kBits <= Vector::kLog2ByChance)
LB_HD void quantize_block_by_chance(F, const float* x, const typename F::Scale& scale,
                                    const uint16_t* random16, uint8_t* codes, int n) {
  if constexpr (kOnLine<F>) {
    constexpr float kStep = 65536.0f;
    constexpr LineOfChance kLine{F::Map::kDivisor * kStep, -F::Map::kShift * kStep,
                                 (F::kCodes - 1) * kStep, F::kLowest * kStep};
    even_by_chance(x, scale.inverse, kLine, book_of_chance<F>(), random16, codes, n);
  } else if constexpr (kByPower<F>) {
    power_by_chance<F::Map::kPower, F::kSigned>(x, scale.inverse, power_line<F>(),
                                                book_of_chance<F>(), random16, codes, n);
  } else if constexpr (kDecades<F>) {
    dynamic_by_chance<F::kSigned>(x, scale.inverse, kDynamicLines<typename F::Map>,
                                  book_of_chance<F>(), random16, codes, n);
  } else {
    constexpr const auto& kTable = kChanceTable<typename F::Map>;
    codebook_by_chance<F::kBits>(x, scale.inverse, kTable.tree, kTable.entry, kTable.rate,
                                 book_of_chance<F>(), random16, codes, n);
  }
}

}  // namespace lowbit
