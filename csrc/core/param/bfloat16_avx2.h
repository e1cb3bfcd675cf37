// Stochastic rounding as in bfloat16.h, 16 values at a time; bfloat16_avx512.h says why it is so
// short.
//
// Included by bfloat16.h, at its end, and by nothing else.
#pragma once

#include <immintrin.h>

namespace lowbit {

/// stored[i] = store(x[i], random16[i])
LB_HD void store_block(BFloat16Stochastic, const float* x, uint16_t* stored, int n,
                       const uint16_t* random16) {
  // Values from the largest finite one on are special.
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff), absmax = _mm256_set1_epi32(0x7f7effff);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256i b[2], special[2];
    for (int j = 0; j < 2; ++j) {
      b[j] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + 8 * j));
      special[j] = _mm256_cmpgt_epi32(_mm256_and_si256(b[j], magnitude), absmax);
      const auto* r = reinterpret_cast<const __m128i*>(random16 + i + 8 * j);
      const __m256i sum = _mm256_add_epi32(b[j], _mm256_cvtepu16_epi32(_mm_loadu_si128(r)));
      b[j] = _mm256_srli_epi32(sum, 16);
    }
    if (__builtin_expect(_mm256_movemask_epi8(_mm256_or_si256(special[0], special[1])) != 0, 0)) {
      for (int j = i; j < i + 16; ++j) stored[j] = bfloat16_stochastic(x[j], random16[j]);
    } else {  // pack instructions work within lanes
      const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(b[0], b[1]), 0xD8);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(stored + i), words);
    }
  }
  for (; i < n; ++i) stored[i] = bfloat16_stochastic(x[i], random16[i]);
}

}  // namespace lowbit
