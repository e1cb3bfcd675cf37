// The leaf functions of one instruction set: everything that touches values. A walk composes them
// per tile at run time, so formats, rules and parameter formats add up instead of multiplying.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/random.h"

namespace lowbit::cpu {

using LoadFn = void (*)(const void* stored, float* out, int n);
/// random16: n values of 16 bits, null where the format draws none.
using StoreFn = void (*)(const float* x, void* stored, int n, const uint16_t* random16);
/// scales: one for each `block` values, the first for the block in which the tile starts.
using DecodeFn = void (*)(const void* codes, const float* scales, int block, float* out, int n);
using EncodeFn = void (*)(const float* x, void* codes, float* scales, int block, int n);
/// Fills out with the random bits of `groups` groups of 8 elements from group `first` on; out has
/// room for 7 groups more.
struct Draw {
  RandomKey key;
  uint64_t first;
  int groups;
  uint16_t* out;
};
/// draw: null, or the random bits to draw meanwhile: an update waits for the divider, drawing for
/// the multipliers.
using UpdateFn = void (*)(const float* g, float* p, float* const* s, int n, const void* coef,
                          const Draw* draw);

struct Leaves {
  static constexpr int kMax = 32;  // registered formats or rules of one kind
  const char* isa;
  LoadFn load_grad[kMax], load_param[kMax];
  StoreFn store_param[kMax];
  DecodeFn decode[kMax];
  EncodeFn encode[kMax];
  UpdateFn update[kMax];
};

extern const Leaves kLeavesBaseline;
#if defined(LOWBIT_X86)
extern const Leaves kLeavesAvx2;
extern const Leaves kLeavesAvx512;
#endif

}  // namespace lowbit::cpu
