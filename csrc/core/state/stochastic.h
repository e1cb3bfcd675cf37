// A code by chance: the entry below z or the one above, the nearer one more often, so that the mean
// of many is z.
//
//   v nearest entry, w the entry on z's other side:   w with probability (z - v) / (w - v)
//
// to 1 / 65536. Beyond the ends the end is taken. A positive value of an unsigned format still
// never becomes zero; below the smallest step the mean is therefore too large, which is the safe
// side.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

template <class F>
LB_HD uint32_t encode_stochastic(float z, uint32_t random16) {
  const uint32_t near = F::encode(z);
  const float v = F::decode(near);
  if (!(z < v) && !(z > v)) return near;
  const uint32_t far = F::neighbour(near, z > v);
  const float w = F::decode(far);
  if (!F::kSigned && w == 0.0f) return near;
  const float share = (z - v) / (w - v) * 65536.0f;
  return static_cast<float>(random16) + 0.5f < share ? far : near;
}

}  // namespace lowbit
