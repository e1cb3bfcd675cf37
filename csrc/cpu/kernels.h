// The kernel functions of one instruction set, which do all work on values. A walk composes them
// per tile at run time, so the code grows with the sum of state formats, rules and parameter
// formats, not with their product.
#pragma once

#include <cstdint>

#include "core/column_sums.h"
#include "core/layout.h"
#include "core/random.h"

namespace lowbit::cpu {

using LoadGradFn = void (*)(const void* stored, float* out, int n);
/// compensation: the format's compensation or correction bits, or null.
using LoadFn = void (*)(const void* stored, const void* compensation, float* out, int n);
/// random16: n values of 16 bits, or null if the format draws none.
using StoreFn = void (*)(const float* x, void* stored, void* compensation, int n,
                         const uint16_t* random16);
/// scales: one for each `block` values, starting with the block that contains the first value.
using DequantizeFn = void (*)(const void* codes, const void* scales, int block, float* out, int n);
/// The maximum number of blocks in one call of `quantize`.
constexpr int kMaxBlocks = kMaxTile / kMinBlock;
/// The scales of blocks in the form that `quantize` reads.
struct BlockScales {
  struct alignas(32) One {
    unsigned char bytes[32];
  } of[kMaxBlocks];
};
/// Finds the scales of blocks and writes them in their stored form. given: null, or
/// StateSlot::block_next of the blocks, which replaces the extremes of x. absmax: null, or the
/// magnitudes that an update found for x.
using ScaleFn = void (*)(const float* x, int block, int n, const uint32_t* given,
                         const float* absmax, void* stored, BlockScales& found);
/// random16: null if codes are rounded to nearest. Scales are found separately: each one waits for
/// its last maximum, and the waits of several blocks overlap.
using QuantizeFn = void (*)(const float* x, void* codes, const BlockScales& scales, int block,
                            int n, const uint16_t* random16);
/// The same with one scale for each value, given as the bits of the largest magnitude it covers.
using DequantizeGivenFn = void (*)(const void* codes, const uint32_t* absmax, float* out, int n);
using QuantizeGivenFn = void (*)(const float* x, void* codes, const uint32_t* absmax, int n,
                                 const uint16_t* random16);
/// Fills `out` with the random bits of `groups` groups of 8 elements, starting with group `first`.
/// `out` has room for 7 more groups.
struct Draw {
  RandomKey key;
  uint64_t first;
  int groups;
  uint16_t* out;
};
using DrawFn = void (*)(const Draw& draw);
/// Layout of the magnitudes that an update finds: for each run of kMaxRun state values, the maxima
/// over values kMaxLanes apart. Slot k starts at k * kMaxOfSlot. Values after the last whole run
/// have none.
constexpr int kMaxRun = 64, kMaxLanes = 16, kMaxOfSlot = kMaxTile / kMaxRun * kMaxLanes;
/// f: two arrays for each factored moment of the rule. draw: null, or random bits to draw in the
/// meantime, because an update waits for the divider while drawing uses the multipliers. absmax:
/// null, or room for the magnitudes of all slots; rules with factored moments do not find them.
using UpdateFn = void (*)(const float* g, float* p, float* const* s, const float* const* f, int n,
                          const void* coef, const Draw* draw, float* absmax);
/// The contributions of the elements to the sums of a round. `grid` is written only in rounds with
/// a grid.
using MeasureFn = void (*)(int round, const float* g, const float* p, const float* const* s,
                           const float* const* f, int n, const void* coef, float* grid,
                           float* const* totals);

/// Adds n terms to one exact sum, or up to ColumnSums::kTogether rows of n terms, `stride` apart,
/// to the sums of n columns.
using AddFn = void (*)(const float* x, int n, int64_t* words);
using AddColumnsFn = void (*)(const float* x, int stride, int rows, int n, ColumnSums& sums,
                              int64_t* words);
/// Returns the largest magnitude as bits. If `columns` is given, raises each column to at least its
/// own.
using AbsmaxFn = uint32_t (*)(const float* x, int n, uint32_t* columns);

/// Adds one addend to each of n words (core/mean_bins.h).
using AddBinsFn = void (*)(uint64_t* words, const float* x, int n, int width);
/// Writes the means of n words, rounded to float32: to nearest, or to odd.
using MeanBinsFn = void (*)(const uint64_t* words, float* means, int n, int width, int64_t divisor,
                            bool odd);

constexpr int kMaxKernels = 96;  // registered formats or rules of one kind

/// What does not depend on state formats or rules.
struct ValueKernels {
  LoadGradFn load_grad[kMaxKernels];
  LoadFn load_param[kMaxKernels];
  StoreFn store_param[kMaxKernels];
  DrawFn draw;
  AddFn add;
  AddColumnsFn add_columns;
  AbsmaxFn absmax;
  AddBinsFn add_bins;
  MeanBinsFn mean_bins;
};
struct StateKernels {
  DequantizeFn dequantize[kMaxKernels];
  ScaleFn scale[kMaxKernels];  // null if the format has no scale
  QuantizeFn quantize[kMaxKernels];
  DequantizeGivenFn dequantize_given[kMaxKernels];  // null if the scale needs more than a maximum
  QuantizeGivenFn quantize_given[kMaxKernels];
};
struct RuleKernels {
  UpdateFn update[kMaxKernels];
  MeasureFn measure[kMaxKernels];  // null if the rule has no rounds
};
struct Kernels : ValueKernels, StateKernels, RuleKernels {
  const char* isa = "";
};

/// Finds scales and writes codes of any number of values, kMaxBlocks blocks at a time.
inline void quantize_run(const Kernels& kernel, int format, const float* x, void* codes,
                         void* stored, int block, int n) {
  BlockScales scales;
  if (kernel.scale[format] != nullptr)
    kernel.scale[format](x, block, n, nullptr, nullptr, stored, scales);
  kernel.quantize[format](x, codes, scales, block, n, nullptr);
}

// Each where it is compiled: LOWBIT_AVX2, ...
extern const ValueKernels kValuesBaseline, kValuesAvx2, kValuesAvx512;
extern const StateKernels kStatesBaseline, kStatesAvx2, kStatesAvx512, kStatesAvx512Vbmi;
extern const RuleKernels kRulesBaseline, kRulesAvx2, kRulesAvx512;

}  // namespace lowbit::cpu
