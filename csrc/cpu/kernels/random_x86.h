// Several Philox calls in vector lanes, with the same bits as core/random.h.
//
// Within a tile only the low word of the group changes. One product of the first round and one of
// the second are therefore the same for all calls, and are computed once as scalars.
#pragma once

#include <immintrin.h>

#include "cpu/kernels.h"

namespace lowbit::cpu {

/// A register of 64-bit lanes, one call in each.
#if defined(__AVX512F__)
struct Lanes {
  using V = __m512i;
  static constexpr int kCount = 8;
  /// In the order in which the words of even lanes, then of odd lanes, are stored.
  LB_HD static V groups() { return _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); }
  LB_HD static V all(uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
  LB_HD static V add(V a, V b) { return _mm512_add_epi64(a, b); }
  LB_HD static V multiply(V a, V b) { return _mm512_mul_epu32(a, b); }  // the low words
  LB_HD static V high_words(V a) { return _mm512_srli_epi64(a, 32); }
  LB_HD static V exclusive_or(V a, V b) { return _mm512_xor_si512(a, b); }
  LB_HD static V exclusive_or(V a, V b, V c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
  /// (hi(product) ^ x ^ key, lo(product)), the last round's output words.
  LB_HD static V two_words(V product, V x, V key) {
    const V swapped = _mm512_ror_epi64(product, 32);
    return _mm512_mask_xor_epi32(swapped, 0x5555, swapped, _mm512_xor_si512(x, key));
  }
  LB_HD static void store(V w01, V w23, uint16_t* out) {
    _mm512_storeu_si512(out, _mm512_unpacklo_epi64(w01, w23));
    _mm512_storeu_si512(out + 32, _mm512_unpackhi_epi64(w01, w23));
  }
};
#elif defined(__AVX2__)
struct Lanes {
  using V = __m256i;
  static constexpr int kCount = 4;
  LB_HD static V groups() { return _mm256_setr_epi64x(0, 2, 1, 3); }
  LB_HD static V all(uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
  LB_HD static V add(V a, V b) { return _mm256_add_epi64(a, b); }
  LB_HD static V multiply(V a, V b) { return _mm256_mul_epu32(a, b); }
  LB_HD static V high_words(V a) { return _mm256_srli_epi64(a, 32); }
  LB_HD static V exclusive_or(V a, V b) { return _mm256_xor_si256(a, b); }
  LB_HD static V exclusive_or(V a, V b, V c) { return _mm256_xor_si256(a, _mm256_xor_si256(b, c)); }
  LB_HD static V two_words(V product, V x, V key) {
    const V low = _mm256_set1_epi64x(0xffffffffll), swapped = _mm256_shuffle_epi32(product, 0xB1);
    return _mm256_xor_si256(swapped, _mm256_and_si256(_mm256_xor_si256(x, key), low));
  }
  LB_HD static void store(V w01, V w23, uint16_t* out) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_unpacklo_epi64(w01, w23));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16), _mm256_unpackhi_epi64(w01, w23));
  }
};
#else
struct Lanes {
  using V = __m128i;
  static constexpr int kCount = 2;
  LB_HD static V groups() { return _mm_set_epi64x(1, 0); }
  LB_HD static V all(uint64_t x) { return _mm_set1_epi64x(static_cast<long long>(x)); }
  LB_HD static V add(V a, V b) { return _mm_add_epi64(a, b); }
  LB_HD static V multiply(V a, V b) { return _mm_mul_epu32(a, b); }
  LB_HD static V high_words(V a) { return _mm_srli_epi64(a, 32); }
  LB_HD static V exclusive_or(V a, V b) { return _mm_xor_si128(a, b); }
  LB_HD static V exclusive_or(V a, V b, V c) { return _mm_xor_si128(a, _mm_xor_si128(b, c)); }
  LB_HD static V two_words(V product, V x, V key) {
    const V low = _mm_set1_epi64x(0xffffffffll), swapped = _mm_shuffle_epi32(product, 0xB1);
    return _mm_xor_si128(swapped, _mm_and_si128(_mm_xor_si128(x, key), low));
  }
  LB_HD static void store(V w01, V w23, uint16_t* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi64(w01, w23));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8), _mm_unpackhi_epi64(w01, w23));
  }
};
#endif

/// Philox with all terms hoisted that do not depend on the low word of the group. Words are in the
/// low halves of 64-bit lanes; the high halves are ignored.
struct PhiloxLanes {
  using V = Lanes::V;
  V m0 = Lanes::all(kPhiloxM0), m1 = Lanes::all(kPhiloxM1);
  V first_x2, second_x0, second_x2, second_x3;
  V key0[kPhiloxRounds], key1[kPhiloxRounds];

  LB_HD PhiloxLanes(const RandomKey& key, uint32_t group_high) {
    uint32_t k0[kPhiloxRounds], k1[kPhiloxRounds];
    for (int r = 0; r < kPhiloxRounds; ++r) {
      k0[r] = key.seed_low + static_cast<uint32_t>(r) * kPhiloxW0;
      k1[r] = key.step + static_cast<uint32_t>(r) * kPhiloxW1;
      key0[r] = Lanes::all(k0[r]);
      key1[r] = Lanes::all(k1[r]);
    }
    const uint64_t b = static_cast<uint64_t>(kPhiloxM1) * key.stream;
    const uint32_t x0 = static_cast<uint32_t>(b >> 32) ^ group_high ^ k0[0],
                   x1 = static_cast<uint32_t>(b);
    const uint64_t a = static_cast<uint64_t>(kPhiloxM0) * x0;
    first_x2 = Lanes::all(key.seed_high ^ k1[0]);
    second_x0 = Lanes::all(x1 ^ k0[1]);
    second_x2 = Lanes::all(static_cast<uint32_t>(a >> 32) ^ k1[1]);
    second_x3 = Lanes::all(static_cast<uint32_t>(a));
  }

  /// The calls for the groups in the lanes of `group`, 8 values of 16 bits each.
  LB_HD void operator()(V group, uint16_t* out) const {
    V a = Lanes::multiply(m0, group);
    V x3 = a, x2 = Lanes::exclusive_or(Lanes::high_words(a), first_x2);
    V b = Lanes::multiply(m1, x2);
    V x0 = Lanes::exclusive_or(Lanes::high_words(b), second_x0), x1 = b;
    x2 = Lanes::exclusive_or(x3, second_x2);
    x3 = second_x3;
    constexpr int kLast = kPhiloxRounds - 1;
    for (int r = 2; r < kLast; ++r) {
      a = Lanes::multiply(m0, x0), b = Lanes::multiply(m1, x2);
      x0 = Lanes::exclusive_or(Lanes::high_words(b), x1, key0[r]), x1 = b;
      x2 = Lanes::exclusive_or(Lanes::high_words(a), x3, key1[r]), x3 = a;
    }
    a = Lanes::multiply(m0, x0), b = Lanes::multiply(m1, x2);
    Lanes::store(Lanes::two_words(b, x1, key0[kLast]), Lanes::two_words(a, x3, key1[kLast]), out);
  }
};

class Drawing {
 public:
  // Groups per iteration. With short vectors, 64 values of an update exceed the processor's
  // lookahead.
#if defined(__AVX2__)
  static constexpr int kGroups = 8;
#else
  static constexpr int kGroups = 2;
#endif
  LB_HD explicit Drawing(const Draw& draw)
      : draw_(draw), philox_(draw.key, static_cast<uint32_t>(draw.first >> 32)) {
    begin(0);
  }
  LB_HD bool more() const { return done_ < until_; }
  LB_HD void next() {
    for (int k = 0; k < kGroups; k += Lanes::kCount, done_ += Lanes::kCount) {
      philox_(group_, draw_.out + 8 * done_);
      group_ = Lanes::add(group_, Lanes::all(Lanes::kCount));
    }
  }
  LB_HD void finish() {
    while (more()) next();
    if (until_ == draw_.groups) return;
    // The low word of the group wraps around inside this tile.
    philox_ = PhiloxLanes(draw_.key, static_cast<uint32_t>((draw_.first >> 32) + 1));
    begin(until_);
    while (more()) next();
  }

 private:
  LB_HD void begin(int from) {
    const uint64_t low = (draw_.first + static_cast<uint64_t>(from)) & 0xffffffffu,
                   left = 0x100000000u - low;
    const int groups = draw_.groups - from;
    until_ = from + (static_cast<uint64_t>(groups) < left ? groups : static_cast<int>(left));
    done_ = from;
    group_ = Lanes::add(Lanes::all(low), Lanes::groups());
  }

  const Draw& draw_;
  PhiloxLanes philox_;
  Lanes::V group_;
  int done_, until_;
};

}  // namespace lowbit::cpu
