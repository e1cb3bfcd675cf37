// The random bits of a tile, drawn in parts between the other work of an update.
#pragma once

#if defined(__SSE2__)
#include "cpu/kernels/random_x86.h"
#else
#include <cstring>

#include "cpu/kernels.h"

namespace lowbit::cpu {

constexpr int kDrawnGroups = 8;  // per iteration

/// The groups of one iteration in a plain loop. Compilers hoist the terms that depend only on the
/// high word of the group.
__attribute__((noinline)) static void draw_turn(RandomKey key, uint64_t group, uint16_t* out) {
  const auto low = static_cast<uint32_t>(group), high = static_cast<uint32_t>(group >> 32);
  const auto put = [&](uint32_t i, const Random8& r) {  // the first half of a word is its low half
    for (uint32_t w = 0; w < 4; ++w) std::memcpy(out + 8 * i + 2 * w, &r.word[w], 4);
  };
  if (low <= ~0u - kDrawnGroups) {
    for (uint32_t i = 0; i < kDrawnGroups; ++i) put(i, random8(key, low + i, high));
  } else {  // the low word may wrap around
    for (uint32_t i = 0; i < kDrawnGroups; ++i) put(i, random8(key, group + i));
  }
}

class Drawing {
 public:
  static constexpr int kGroups = kDrawnGroups;
  LB_HD explicit Drawing(const Draw& draw) : draw_(draw) {}
  LB_HD bool more() const { return done_ < draw_.groups; }
  LB_HD void next() {
    draw_turn(draw_.key, draw_.first + static_cast<uint64_t>(done_), draw_.out + 8 * done_);
    done_ += kGroups;
  }
  LB_HD void finish() {
    while (more()) next();
  }

 private:
  const Draw& draw_;
  int done_ = 0;
};

}  // namespace lowbit::cpu
#endif
