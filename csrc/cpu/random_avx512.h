// Eight Philox calls to a register, the same bits as core/random.h.
//
// Across a tile only the low word of the group changes. So one product of the first round and one of the second are the same for all calls and
// are taken once, as scalars.
#pragma once

#include <immintrin.h>

#include "cpu/leaves.h"

namespace lowbit::cpu {

/// The high words of 64-bit products, in the low words.
LB_HD __m512i high_words(__m512i product) { return _mm512_srli_epi64(product, 32); }
LB_HD __m512i xor3(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }

/// The last round's output words (hi(product) ^ x ^ key, lo(product)) in one 64-bit lane.
LB_HD __m512i two_words(__m512i product, __m512i x, __m512i key) {
  const __m512i swapped = _mm512_ror_epi64(product, 32);
  return _mm512_mask_xor_epi32(swapped, 0x5555, swapped, _mm512_xor_si512(x, key));
}

/// Philox with everything that does not depend on the low word of the group taken out. Words live in the low halves of 64-bit lanes;
/// what is in the high halves does not count.
struct Philox8 {
  __m512i m0 = _mm512_set1_epi64(kPhiloxM0), m1 = _mm512_set1_epi64(kPhiloxM1);
  __m512i first_x2, second_x0, second_x2, second_x3;
  __m512i key0[kPhiloxRounds], key1[kPhiloxRounds];

  LB_HD Philox8(const RandomKey& key, uint32_t group_high) {
    uint32_t k0[kPhiloxRounds], k1[kPhiloxRounds];
    for (int r = 0; r < kPhiloxRounds; ++r) {
      k0[r] = key.seed_low + static_cast<uint32_t>(r) * kPhiloxW0;
      k1[r] = key.step + static_cast<uint32_t>(r) * kPhiloxW1;
      key0[r] = _mm512_set1_epi32(static_cast<int>(k0[r]));
      key1[r] = _mm512_set1_epi32(static_cast<int>(k1[r]));
    }
    const uint64_t b = static_cast<uint64_t>(kPhiloxM1) * key.stream;
    const uint32_t x0 = static_cast<uint32_t>(b >> 32) ^ group_high ^ k0[0], x1 = static_cast<uint32_t>(b);
    const uint64_t a = static_cast<uint64_t>(kPhiloxM0) * x0;
    first_x2 = all(key.seed_high ^ k1[0]);
    second_x0 = all(x1 ^ k0[1]);
    second_x2 = all(static_cast<uint32_t>(a >> 32) ^ k1[1]);
    second_x3 = all(static_cast<uint32_t>(a));
  }

  /// words[0]: the calls of the even lanes of `group`, in order, 128 bits each; words[1]: of the odd lanes.
  LB_HD void operator()(__m512i group, __m512i* words) const {
    __m512i a = _mm512_mul_epu32(m0, group);
    __m512i x3 = a, x2 = _mm512_xor_si512(high_words(a), first_x2);
    __m512i b = _mm512_mul_epu32(m1, x2);
    __m512i x0 = _mm512_xor_si512(high_words(b), second_x0), x1 = b;
    x2 = _mm512_xor_si512(x3, second_x2);
    x3 = second_x3;
    for (int r = 2; r < kPhiloxRounds - 1; ++r) {
      a = _mm512_mul_epu32(m0, x0), b = _mm512_mul_epu32(m1, x2);
      x0 = xor3(high_words(b), x1, key0[r]), x1 = b;
      x2 = xor3(high_words(a), x3, key1[r]), x3 = a;
    }
    a = _mm512_mul_epu32(m0, x0), b = _mm512_mul_epu32(m1, x2);
    const __m512i w01 = two_words(b, x1, key0[kPhiloxRounds - 1]), w23 = two_words(a, x3, key1[kPhiloxRounds - 1]);
    words[0] = _mm512_unpacklo_epi64(w01, w23);
    words[1] = _mm512_unpackhi_epi64(w01, w23);
  }

 private:
  LB_HD static __m512i all(uint32_t x) { return _mm512_set1_epi64(x); }
};

/// Eight groups a turn.
class Drawing {
 public:
  LB_HD explicit Drawing(const Draw& draw) : draw_(draw), philox_(draw.key, static_cast<uint32_t>(draw.first >> 32)) { begin(0); }
  LB_HD bool more() const { return done_ < until_; }
  LB_HD void next() {
    __m512i words[2];
    philox_(group_, words);
    _mm512_storeu_si512(draw_.out + 8 * done_, words[0]);
    _mm512_storeu_si512(draw_.out + 8 * done_ + 32, words[1]);
    group_ = _mm512_add_epi64(group_, _mm512_set1_epi64(8));
    done_ += 8;
  }
  LB_HD void finish() {
    while (more()) next();
    if (until_ == draw_.groups) return;
    // The low word of the group begins again inside this tile.
    philox_ = Philox8(draw_.key, static_cast<uint32_t>((draw_.first >> 32) + 1));
    begin(until_);
    while (more()) next();
  }

 private:
  LB_HD void begin(int from) {
    const uint64_t low = (draw_.first + static_cast<uint64_t>(from)) & 0xffffffffu, left = 0x100000000u - low;
    const int groups = draw_.groups - from;
    until_ = from + (static_cast<uint64_t>(groups) < left ? groups : static_cast<int>(left));
    done_ = from;
    // Lanes in the order in which the words of even and odd ones are stored one after the other.
    const __m512i lane = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    group_ = _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(low)), lane);
  }

  const Draw& draw_;
  Philox8 philox_;
  __m512i group_;
  int done_, until_;
};

}  // namespace lowbit::cpu
