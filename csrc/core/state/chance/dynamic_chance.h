// Stochastic codes of dynamic.h of 5 to 7 bits, with the codes of stochastic.h, for many values at
// once: dynamic8_chance.h says how places and random bits decide.
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
  places_by_chance(x, inverse, book, random16, codes, n, [&](V::Float z, V::Int& near) LB_LAMBDA {
    return near = dynamic_place<kSigned>(z, lines);
  });
}

}  // namespace lowbit
