// Kahan-compensated 16-bit parameters (arXiv:2010.06192). The compensation c has the 16-bit type of
// the parameter w: it is the part of w that rounding added.
//
//   load   W = w - c
//   store  w' = nearest(W'),  c' = nearest(w' - W')
//
// With u = W' - W this is the paper's y = u - c, w' = w + y, c' = (w' - w) - y, where only w' and
// c' are rounded. c is at most half a step of w, so w and c together have 16 significant bits. An
// update is lost only below 2^-9 of a step.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "core/param/bfloat16.h"

namespace lowbit {

struct BFloat16Kahan {
  static constexpr const char* kName = "bfloat16_kahan";
  static constexpr const char* kDtype = "bfloat16";
  static constexpr bool kRandom = false;
  static constexpr const char* kCompensationDtype = "bfloat16";
  using Storage = uint16_t;
  using Compensation = uint16_t;
  LB_HD static float load(uint16_t stored, uint16_t added) {
    return bfloat16_to_float(stored) - bfloat16_to_float(added);
  }
  LB_HD static uint16_t store(float x, uint32_t, uint16_t& added) {
    const uint32_t w = bfloat16_nearest_word(x) & 0xffff0000u;
    const uint32_t finite = all_if_negative((w & 0x7fffffffu) - kInfinityBits);
    added = static_cast<uint16_t>((bfloat16_nearest_word(bits_float(w) - x) & finite) >> 16);
    return static_cast<uint16_t>(w >> 16);
  }
};

struct Float16Kahan {
  static constexpr const char* kName = "float16_kahan";
  static constexpr const char* kDtype = "float16";
  static constexpr bool kRandom = false;
  static constexpr const char* kCompensationDtype = "float16";
  using Storage = uint16_t;
  using Compensation = uint16_t;
  LB_HD static float load(uint16_t stored, uint16_t added) {
    return half_to_float(stored) - half_to_float(added);
  }
  LB_HD static uint16_t store(float x, uint32_t, uint16_t& added) {
    const uint16_t w = half_nearest(x);
    const float stored = half_to_float(w);
    added = magnitude_bits(stored) < kInfinityBits ? half_nearest(stored - x) : uint16_t{0};
    return w;
  }
};

}  // namespace lowbit
