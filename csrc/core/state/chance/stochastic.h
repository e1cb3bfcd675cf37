// Stochastic codes: the entry below a value or the one above, the nearer one more often, so that
// the expected value is the value itself.
//
//   v nearest code, w the code on x's other side:   w with probability (x - v) / (w - v)
//
// in steps of 1 / 65536, where x, v and w are values. Where z is proportional to x, the quotient is
// taken in z. Logarithms and roots are not: a chance linear in them would keep the mean of the
// logarithm, and a mean that many small steps move (a second moment) would settle above its value.
// Values beyond either end become that end. A positive value of an unsigned format never becomes
// zero; below the smallest step the expected value is therefore too large, which is the safe side.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

/// Whether z is not a multiple of x under a scale: it says kCurved.
template <class Scale>
LB_HD constexpr bool is_curved() {
  if constexpr (requires { Scale::kCurved; }) {
    return Scale::kCurved;
  } else {
    return false;
  }
}

/// `code` is anything with a format's quantize, dequantize and neighbour; z = scale.to_z(x).
template <class Code, class Scale>
LB_HD uint32_t stochastic_code(const Code& code, bool is_signed, const Scale& scale, float x,
                               float z, uint32_t random16) {
  const uint32_t near = code.quantize(z);
  const float v = code.dequantize(near);
  if (!(z < v) && !(z > v)) return near;
  const uint32_t far = code.neighbour(near, z > v);
  const float w = code.dequantize(far);
  if (!is_signed && w == 0.0f) return near;
  float share = (z - v) / (w - v);
  if constexpr (is_curved<Scale>()) {
    const float value = scale.from_z(v);
    share = (x - value) / (scale.from_z(w) - value);
  }
  return static_cast<float>(random16) + 0.5f < share * 65536.0f ? far : near;
}

template <class F>
LB_HD uint32_t quantize_stochastic(const typename F::Scale& scale, float x, uint32_t random16) {
  return stochastic_code(F{}, F::kSigned, scale, x, scale.to_z(x), random16);
}

}  // namespace lowbit
