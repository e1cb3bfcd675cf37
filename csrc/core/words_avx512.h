// 32-bit lanes as pairs of 16-bit words.
#pragma once

#include <immintrin.h>

#include "core/macros.h"

namespace lowbit {

/// The indices of the upper words of 32 lanes in two registers, for _mm512_permutex2var_epi16.
LB_HD __m512i upper_words() {
  return _mm512_setr_epi64(0x0007000500030001, 0x000f000d000b0009, 0x0017001500130011,
                           0x001f001d001b0019, 0x0027002500230021, 0x002f002d002b0029,
                           0x0037003500330031, 0x003f003d003b0039);
}

}  // namespace lowbit
