// dynamic8.h over many values, in plain loops for any instruction set: quantized by cells
// (cells.h), dequantized by the map.
//
// Included by dynamic8.h, at its end, and by nothing else.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <cstring>

#include "core/state/cells.h"

namespace lowbit {

/// The signed map, indexed by code.
struct Dynamic8Values {
  float of[256] = {};
  constexpr explicit Dynamic8Values(const Dynamic8Tables<0>& t) {
    for (int code = 0; code < 256; ++code)
      of[code] = code < 127 ? -t.magnitude[127 - code] : t.magnitude[code - 127];
  }
};
constexpr Dynamic8Values kDynamic8Values{Dynamic8Tables<0>{}};

#if !defined(__AVX2__)
constexpr CellTable<8, true, cell_binades(kDynamic8Values.of, 256, true)> kDynamic8Cells{
    kDynamic8Values.of, 256};
constexpr CellTable<8, false, cell_binades(kDynamic8UnsignedTables.magnitude, 256, false)>
    kDynamic8UnsignedCells{kDynamic8UnsignedTables.magnitude, 256};
static_assert(kDynamic8Cells.exact && kDynamic8UnsignedCells.exact);

LB_HD void quantize_block(Dynamic8, const float* x, const BlockScale& s, uint8_t* codes, int n) {
  quantize_cells(x, s.inverse, kDynamic8Cells.cells(), codes, n);
}
LB_HD void quantize_block(Dynamic8Unsigned, const float* x, const BlockScale& s, uint8_t* codes,
                          int n) {
  quantize_cells(x, s.inverse, kDynamic8UnsignedCells.cells(), codes, n);
}
#endif

/// Several at a time by hand: compilers would move codes into vectors and out of them again.
LB_HD void dequantize_by_table(const float* map, const uint8_t* codes, float scale, float* out,
                               int n) {
  int i = 0;
#if defined(__AVX2__)
  // Loads limit this loop. It reads eight codes per word, and loads values by insert instructions,
  // two per value.
  const __m256 scales = _mm256_set1_ps(scale);
  const auto four = [&](uint32_t w) {
    __m128 v = _mm_load_ss(map + (w & 255));
    asm("vinsertps $0x10, %1, %0, %0" : "+x"(v) : "m"(map[w >> 8 & 255]));
    asm("vinsertps $0x20, %1, %0, %0" : "+x"(v) : "m"(map[w >> 16 & 255]));
    asm("vinsertps $0x30, %1, %0, %0" : "+x"(v) : "m"(map[w >> 24]));
    return v;
  };
  for (; i + 8 <= n; i += 8) {
    uint64_t w;
    std::memcpy(&w, codes + i, 8);
    const __m256 v =
        _mm256_set_m128(four(static_cast<uint32_t>(w >> 32)), four(static_cast<uint32_t>(w)));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(v, scales));
  }
#elif defined(__SSE2__)
  const __m128 scales = _mm_set1_ps(scale);
  const auto two = [&](int at) {
    return _mm_unpacklo_ps(_mm_load_ss(map + codes[at]), _mm_load_ss(map + codes[at + 1]));
  };
  for (; i + 4 <= n; i += 4)
    _mm_storeu_ps(out + i, _mm_mul_ps(_mm_movelh_ps(two(i), two(i + 2)), scales));
#else
  for (; i + 8 <= n; i += 8) {
    const float v[8] = {map[codes[i]],     map[codes[i + 1]], map[codes[i + 2]], map[codes[i + 3]],
                        map[codes[i + 4]], map[codes[i + 5]], map[codes[i + 6]], map[codes[i + 7]]};
    for (int j = 0; j < 8; ++j) out[i + j] = v[j] * scale;
  }
#endif
  for (; i < n; ++i) out[i] = map[codes[i]] * scale;
}

LB_HD void dequantize_block(Dynamic8, const uint8_t* codes, const BlockScale& s, float* out,
                            int n) {
  dequantize_by_table(kDynamic8Values.of, codes, s.scale, out, n);
}
LB_HD void dequantize_block(Dynamic8Unsigned, const uint8_t* codes, const BlockScale& s, float* out,
                            int n) {
  dequantize_by_table(kDynamic8UnsignedTables.magnitude, codes, s.scale, out, n);
}

}  // namespace lowbit

#if defined(__AVX2__) && defined(__FMA__)
#include "core/state/dynamic8_avx2.h"
#endif
