// Sixteen Philox calls at a time, the same bits as core/random.h.
#pragma once

#if defined(__AVX512F__)
#define LOWBIT_RANDOM_AVX512 1
#include <immintrin.h>

#include "core/random.h"

namespace lowbit::cpu {

/// Eight calls, one in each 64-bit lane; only the low 32 bits of x0, x2 count on entry and of x0..x3 on exit.
LB_HD void philox8(__m512i& x0, __m512i& x1, __m512i& x2, __m512i& x3, uint32_t k0, uint32_t k1) {
  const __m512i m0 = _mm512_set1_epi64(kPhiloxM0), m1 = _mm512_set1_epi64(kPhiloxM1);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const __m512i a = _mm512_mul_epu32(m0, x0), b = _mm512_mul_epu32(m1, x2);
    const __m512i key0 = _mm512_set1_epi64(k0), key1 = _mm512_set1_epi64(k1);
    x0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(b, 32), x1, key0, 0x96);  // xor of the three
    x1 = b;
    x2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(a, 32), x3, key1, 0x96);
    x3 = a;
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
}

/// out must have room for a multiple of 8 groups.
LB_HD void random_groups_avx512(const RandomKey& key, uint64_t first, int groups, uint16_t* out) {
  const __m512i low = _mm512_set1_epi64(0xffffffffll);
  const __m512i lane = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  for (int g = 0; g < groups; g += 8) {
    const __m512i index = _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(first + static_cast<uint64_t>(g))), lane);
    __m512i x0 = index, x1 = _mm512_srli_epi64(index, 32);
    __m512i x2 = _mm512_set1_epi64(key.stream), x3 = _mm512_set1_epi64(key.seed_high);
    philox8(x0, x1, x2, x3, key.seed_low, key.step);
    // Lane by lane the words 0, 1 and 2, 3 become 64 bits, then the 128 bits of each group are put in order.
    const __m512i w01 = _mm512_or_si512(_mm512_and_si512(x0, low), _mm512_slli_epi64(x1, 32));
    const __m512i w23 = _mm512_or_si512(_mm512_and_si512(x2, low), _mm512_slli_epi64(x3, 32));
    const __m512i even = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), odd = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    _mm512_storeu_si512(out + 8 * g, _mm512_permutex2var_epi64(w01, even, w23));
    _mm512_storeu_si512(out + 8 * g + 32, _mm512_permutex2var_epi64(w01, odd, w23));
  }
}

}  // namespace lowbit::cpu
#endif
