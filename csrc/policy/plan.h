// The plan of a step: one row of int64 for each parameter, which says how its state is laid out.
// This is the one definition of its columns. Python reads their names from the catalog and writes
// rows by name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/job.h"

namespace lowbit {

/// One update-rule state in a plan row. All zeros where the rule has fewer of them.
struct PlanSlot {
  int64_t format;      // index into StateFormats
  int64_t block;       // length of a block, 0 where no block has a scale
  int64_t scale;       // a ScaleKind
  int64_t stochastic;  // 1 where codes are rounded stochastically
};

struct PlanRow {
  static constexpr int kMaxDims = 6;
  int64_t rows, cols;    // the local part
  int64_t global_cols;   // of the whole parameter
  int64_t first;         // global flat index of the local element (0, 0)
  int64_t stream;        // of random bits
  int64_t param_format;  // index into ParamFormats
  int64_t numel;         // of the whole parameter
  // The last two dimensions, for factored moments: how many such matrices are here, their local
  // lengths and those of the whole parameter.
  int64_t batches, inner_rows, inner_cols, global_inner_rows, global_inner_cols;
  PlanSlot slot[kMaxSlots];
  int64_t dims, dim[kMaxDims];  // the local shape, where a scale is of rank 1
  int64_t front, back;          // elements of the first and last row that are not here
  int64_t cut;                  // a Cut
};
inline constexpr int kPlanColumns = sizeof(PlanRow) / sizeof(int64_t);
static_assert(sizeof(PlanRow) == kPlanColumns * sizeof(int64_t));

/// By ScaleKind.
inline constexpr const char* kScaleNames[] = {"none", "block", "row", "column", "tensor", "rank1"};
static_assert(sizeof kScaleNames / sizeof *kScaleNames == kScaleKinds);
/// By Cut.
inline constexpr const char* kCutNames[] = {"none", "ends", "all"};
static_assert(sizeof kCutNames / sizeof *kCutNames == kCuts);

/// {"columns": [a name for each], "slots", "dims": how many of each a row has, "scales", "cuts":
/// [names, by number]}.
std::string plan_json();

}  // namespace lowbit
