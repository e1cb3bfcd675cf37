// Stochastic rounding as in bfloat16.h, 32 values at a time.
//
// Away from infinity, NaN and the largest finite value, (bits + r) >> 16 of the whole word is the
// answer: the carry cannot reach the sign. Where such a value is met, the whole turn is left to the
// scalar definition.
//
// Included by bfloat16.h, at its end, and by nothing else.
#pragma once

#include <immintrin.h>

#include "core/words_avx512.h"

namespace lowbit {

/// stored[i] = store(x[i], random16[i])
LB_HD void store_block(BFloat16Stochastic, const float* x, uint16_t* stored, int n,
                       const uint16_t* random16) {
  const __m512i upper = upper_words();
  const __m512i lower = _mm512_sub_epi16(upper, _mm512_set1_epi16(1));
  int i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512i a = _mm512_loadu_si512(x + i), b = _mm512_loadu_si512(x + i + 16);
    const __m512i high = _mm512_permutex2var_epi16(a, upper, b),
                  low = _mm512_permutex2var_epi16(a, lower, b);
    const __m512i r = _mm512_loadu_si512(random16 + i);
    const __mmask32 special = _mm512_cmpge_epu16_mask(
        _mm512_add_epi16(high, high), _mm512_set1_epi16(static_cast<int16_t>(0xfefe)));
    // Whether the sum wrapped.
    const __mmask32 up = _mm512_cmplt_epu16_mask(_mm512_add_epi16(low, r), r);
    const __m512i rounded = _mm512_mask_add_epi16(high, up, high, _mm512_set1_epi16(1));
    if (__builtin_expect(special != 0, 0)) {
      for (int j = i; j < i + 32; ++j) stored[j] = bfloat16_stochastic(x[j], random16[j]);
    } else {
      _mm512_storeu_si512(stored + i, rounded);
    }
  }
  for (; i < n; ++i) stored[i] = bfloat16_stochastic(x[i], random16[i]);
}

}  // namespace lowbit
