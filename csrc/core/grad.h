// What a gradient may be stored as. Gradients are only read.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/param/bfloat16.h"

namespace lowbit {

struct Float32Grad {
  static constexpr const char* kDtype = "float32";
  using Storage = float;
  LB_HD static float load(float stored) { return stored; }
};

struct BFloat16Grad {
  static constexpr const char* kDtype = "bfloat16";
  using Storage = uint16_t;
  LB_HD static float load(uint16_t stored) { return bfloat16_to_float(stored); }
};

struct Float16Grad {
  static constexpr const char* kDtype = "float16";
  using Storage = uint16_t;
  /// Exact for every value. The exponent is rebiased by a multiplication, which also normalises
  /// subnormals; the largest exponent is infinity or NaN, whose payload is kept.
  LB_HD static float load(uint16_t stored) {
    const uint32_t magnitude = static_cast<uint32_t>(stored & 0x7fffu) << 13;
    const uint32_t sign = static_cast<uint32_t>(stored & 0x8000u) << 16;
    const float finite = bits_float(magnitude) * bits_float(0x77800000u);  // 2^112
    const uint32_t bits = magnitude >= 0x0f800000u ? magnitude | kInfinityBits : float_bits(finite);
    return bits_float(bits | sign);
  }
};

}  // namespace lowbit
