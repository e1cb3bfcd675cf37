// Stochastic codes: the entry below z or the one above, the nearer one more often, so that the
// expected value is z.
//
//   v nearest entry, w the entry on z's other side:   w with probability (z - v) / (w - v)
//
// in steps of 1 / 65536. Values beyond either end become that end. A positive value of an unsigned
// format never becomes zero; below the smallest step the expected value is therefore too large,
// which is the safe side.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

/// `code` is anything with a format's quantize, dequantize and neighbour.
template <class Code>
LB_HD uint32_t stochastic_code(const Code& code, bool is_signed, float z, uint32_t random16) {
  const uint32_t near = code.quantize(z);
  const float v = code.dequantize(near);
  if (!(z < v) && !(z > v)) return near;
  const uint32_t far = code.neighbour(near, z > v);
  const float w = code.dequantize(far);
  if (!is_signed && w == 0.0f) return near;
  const float share = (z - v) / (w - v) * 65536.0f;
  return static_cast<float>(random16) + 0.5f < share ? far : near;
}

template <class F>
LB_HD uint32_t quantize_stochastic(float z, uint32_t random16) {
  return stochastic_code(F{}, F::kSigned, z, random16);
}

}  // namespace lowbit
