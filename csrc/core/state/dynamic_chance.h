// Stochastic codes of dynamic.h of 5 to 7 bits, with the codes of stochastic.h, for many values at once:
// dynamic8_chance.h says how places and random bits decide.
//
// Included by codebook_chance.h and by nothing else.
#pragma once

namespace lowbit {

/// codes[i] = book.code_of(x[i] * inverse, random16[i])
template <bool kSigned>
__attribute__((noinline)) static void dynamic_by_chance(const float* x, float inverse,
                                                        const DynamicLines& lines,
                                                        const BookOfChance& book,
                                                        const uint16_t* random16, uint8_t* codes,
                                                        int n) {
  using V = Vector;
  constexpr int kTurn = 4 * V::kLanes, kUnsure = 8;
  const auto all = V::all(inverse);
  int i = 0;
  for (; i + kTurn <= n; i += kTurn) {
    typename V::Int sum[4], least[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const auto z = V::times(V::load(x + i + v * V::kLanes), all);
      const auto place = dynamic_place<kSigned>(z, lines);
      sum[v] = add_chance<kUnsure, V>(place, place, random16 + i + v * V::kLanes, least[v]);
    }
    V::store_upper(sum, codes + i);
    define_unsure<V, kUnsure>(least, [&](int at) LB_LAMBDA {
      codes[i + at] = book.code_of(x[i + at] * inverse, random16[i + at]);
    });
  }
  for (; i < n; ++i) codes[i] = book.code_of(x[i] * inverse, random16[i]);
}

}  // namespace lowbit
