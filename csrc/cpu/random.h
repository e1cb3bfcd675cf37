// Drawing the random bits of a tile, in parts that an update takes between its own work.
#pragma once

#if defined(__AVX2__)
#include "cpu/random_x86.h"
#else
#include "cpu/leaves.h"

namespace lowbit::cpu {

/// One function a group, all of them at the end.
struct Drawing {
  const Draw& draw;

  LB_HD explicit Drawing(const Draw& d) : draw(d) {}
  LB_HD bool more() const { return false; }
  LB_HD void next() {}
  LB_HD void finish() {
    for (int g = 0; g < draw.groups; ++g) {
      const Random8 r = random8(draw.key, draw.first + static_cast<uint64_t>(g));
      for (int e = 0; e < 8; ++e) draw.out[8 * g + e] = static_cast<uint16_t>(r.bits16(e));
    }
  }
};

}  // namespace lowbit::cpu
#endif
