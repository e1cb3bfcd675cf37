// Stochastic codes of power.h of 5 to 8 bits, with the codes of stochastic.h, for many values at
// once.
//
// In the units of power_block.h u lies between entries j and j + 1, which are (j + a)^2 and (j + 1
// + a)^2, and
//
//   share = (u - (j + a)^2) / (2 j + 1 + 2 a)
//
// The two smallest entries of a signed map, +-1/4, lie on a line through 0. z = 0 is as far from
// both, and belongs to the upper one, so that zeros are not unsure. The share errs by less than two
// steps.
//
// Included by codebook_chance.h and by nothing else.
#pragma once

namespace lowbit {

/// Where values lie between codes, in steps of 2^-16.
template <int kPower, bool kSigned>
struct PowerBetween {
  using V = Vector;
  using Float = V::Float;

  LB_HD static V::Int words(Float z, const PowerLine& line) {
    constexpr float kA = kSigned ? 0.5f : 1.0f, kStep = 65536.0f;
    const Float top = V::all(kPower == 1 ? line.half : line.half * line.half);
    const Float m = kSigned ? V::magnitude(z) : z;
    const Float u = V::smaller(top, V::times(m, V::all(line.scale)));  // NaN stays NaN
    Float from_zero;  // in units of entries: a + j + share
    if constexpr (kPower == 1) {
      from_zero = u;
    } else {
      // An entry too low or too high by one has a share of 1 or more, or less than 0: the sum is
      // the same.
      const Float above = V::larger(V::all(kA * kA), u);
      const Float j = V::nearest_integer(V::minus(V::root(above), V::all(kA + 0.5f)));
      const Float own = V::plus(j, V::all(kA));
      const Float width = V::plus_product(j, V::all(2.0f), V::all(2 * kA + 1.0f));
      const Float way = V::minus(above, V::times(own, own));
      from_zero = V::plus(own, V::over(way, width));
      if constexpr (kSigned) {  // entry 0 is 1/4 in these units, and its root 1/2
        from_zero = V::choose(V::at_least(u, V::all(kA * kA)), V::plus(u, u), from_zero);
      }
    }
    if constexpr (kSigned) {
      from_zero =
          V::choose(V::at_least(z, V::all(0.0f)), V::minus(V::all(0.0f), from_zero), from_zero);
    }
    const float zero = kSigned ? line.last / 2 : -1.0f;
    const Float place = V::plus_product(from_zero, V::all(kStep), V::all(zero * kStep));
    return V::rounded(V::larger(place, V::all(0.0f)));  // NaN becomes code 0
  }
};

/// codes[i] = book.code_of(x[i] * inverse, random16[i])
template <int kPower, bool kSigned>
__attribute__((noinline)) static void power_by_chance(const float* x, float inverse,
                                                      const PowerLine& line,
                                                      const BookOfChance& book,
                                                      const uint16_t* random16, uint8_t* codes,
                                                      int n) {
  using V = Vector;
  const PowerLine of = line;
  places_by_chance(x, inverse, book, random16, codes, n, [&](V::Float z, V::Int& near) LB_LAMBDA {
    const auto position = near = PowerBetween<kPower, kSigned>::words(z, of);
    if constexpr (kSigned)
      near = V::set(near, V::at_least(V::all(0.0f), V::magnitude(z)), kUnsurePlace);
    return position;
  });
}

}  // namespace lowbit
