// The leaf functions of one instruction set: everything that touches values. A walk composes them
// per tile at run time, so formats, rules and parameter formats add up instead of multiplying.
#pragma once

#include <cstdint>

#include "core/column_sums.h"
#include "core/layout.h"
#include "core/random.h"

namespace lowbit::cpu {

using LoadGradFn = void (*)(const void* stored, float* out, int n);
/// extra: what the format keeps beside the parameter, null where it keeps nothing.
using LoadFn = void (*)(const void* stored, const void* extra, float* out, int n);
/// random16: n values of 16 bits, null where the format draws none.
using StoreFn = void (*)(const float* x, void* stored, void* extra, int n,
                         const uint16_t* random16);
/// scales: one entry for each `block` values, the first for the block in which the tile starts.
using DecodeFn = void (*)(const void* codes, const void* scales, int block, float* out, int n);
/// At most so many blocks are encoded at a time.
constexpr int kMostBlocks = kMostTile / kLeastBlock;
/// The scales of blocks as `encode` takes them.
struct BlockScales {
  struct alignas(32) One {
    unsigned char bytes[32];
  } of[kMostBlocks];
};
/// Finds the scales of blocks, and writes them as they are stored. given: null, or what
/// StateSlot::block_next holds of the blocks, which then takes the place of what x says of them.
/// most: null, or what an update found of x.
using ScaleFn = void (*)(const float* x, int block, int n, const uint32_t* given, const float* most,
                         void* stored, BlockScales& found);
/// random16: null where codes are rounded to the nearest. Apart from finding the scales: each waits
/// long for its last maximum, all of them together no longer.
using EncodeFn = void (*)(const float* x, void* codes, const BlockScales& scales, int block, int n,
                          const uint16_t* random16);
/// The same with a scale for each value, from the bits of the largest magnitude that it covers.
using DecodeGivenFn = void (*)(const void* codes, const uint32_t* most, float* out, int n);
using EncodeGivenFn = void (*)(const float* x, void* codes, const uint32_t* most, int n,
                               const uint16_t* random16);
/// Fills out with the random bits of `groups` groups of 8 elements from group `first` on; out has
/// room for 7 groups more.
struct Draw {
  RandomKey key;
  uint64_t first;
  int groups;
  uint16_t* out;
};
using DrawFn = void (*)(const Draw& draw);
/// Where an update leaves the largest magnitudes of the state's values that lie kMostLanes
/// apart in each kMostRun of them, of slot k from k * kMostOfSlot on; those of a rest are not found.
constexpr int kMostRun = 64, kMostLanes = 16, kMostOfSlot = kMostTile / kMostRun * kMostLanes;
/// f: two arrays for each factored moment of the rule. draw: null, or the random bits to draw
/// meanwhile: an update waits for the divider, drawing for the multipliers. most: null, or room for
/// the magnitudes of all slots, which rules of factored moments do not find.
using UpdateFn = void (*)(const float* g, float* p, float* const* s, const float* const* f, int n,
                          const void* coef, const Draw* draw, float* most);
/// What the elements add to the sums of a round; grid is written only where the round has one.
using MeasureFn = void (*)(int round, const float* g, const float* p, const float* const* s,
                           const float* const* f, int n, const void* coef, float* grid,
                           float* const* totals);

/// Adds n terms to an exact sum, and a row of n terms to those of n columns.
using AddFn = void (*)(const float* x, int n, int64_t* words);
using AddColumnsFn = void (*)(const float* x, int n, ColumnSums& sums, int64_t* words);
/// The largest magnitude as bits; raises those of the columns to each one's, where there are any.
using MostFn = uint32_t (*)(const float* x, int n, uint32_t* columns);

struct Leaves {
  static constexpr int kMax = 96;  // registered formats or rules of one kind
  const char* isa;
  LoadGradFn load_grad[kMax];
  LoadFn load_param[kMax];
  StoreFn store_param[kMax];
  DecodeFn decode[kMax];
  ScaleFn scale[kMax];  // null where the format has no scale
  EncodeFn encode[kMax];
  DecodeGivenFn decode_given[kMax];  // null where the format's scale needs more than a maximum
  EncodeGivenFn encode_given[kMax];
  UpdateFn update[kMax];
  MeasureFn measure[kMax];  // null where the rule has no rounds
  DrawFn draw;
  AddFn add;
  AddColumnsFn add_columns;
  MostFn most;
};

/// Scales and codes of a run of values in at most kMostBlocks blocks.
inline void encode_run(const Leaves& leaf, int format, const float* x, void* codes, void* stored,
                       int block, int n) {
  BlockScales scales;
  if (leaf.scale[format] != nullptr)
    leaf.scale[format](x, block, n, nullptr, nullptr, stored, scales);
  leaf.encode[format](x, codes, scales, block, n, nullptr);
}

extern const Leaves kLeavesBaseline;
#if defined(LOWBIT_X86)
extern const Leaves kLeavesAvx2;
extern const Leaves kLeavesAvx512;
extern const Leaves kLeavesAvx512Vbmi;
#endif

}  // namespace lowbit::cpu
