// One float32 scale per block of a row: the block's largest magnitude.
//
//   scale = absmax,  z = x * (1 / scale)        x ~ map(code) * scale
//
// absmax == 0:           scale 0, every code the code of zero.
// 0 < absmax < 2^-126:   scale 2^-126, so that the reciprocal is finite and a positive second
// moment cannot become zero. absmax not finite:     scale NaN, every code the code of zero: the
// whole block decodes to NaN, on every processor the same one.
#pragma once

#include <cstdint>

#include "core/bits.h"

namespace lowbit {

struct BlockScale {
  float scale, inverse;
  bool coded;  // false: every code is the format's code of zero

  LB_HD static BlockScale of(uint32_t absmax_bits) {
    if (absmax_bits >= kInfinityBits) return {bits_float(kCanonicalNan), 0.0f, false};
    if (absmax_bits == 0) return {0.0f, 0.0f, false};
    constexpr uint32_t kSmallest = 0x00800000u;  // 2^-126
    const float scale = bits_float(absmax_bits < kSmallest ? kSmallest : absmax_bits);
    return {scale, 1.0f / scale, true};
  }
};

}  // namespace lowbit
