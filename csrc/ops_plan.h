// What the operator `step` is handed, checked and made into jobs: the same for both processors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops.h"

namespace lowbit {

// Columns of a plan row; lowbit/layout.py writes them.
enum SlotColumn { kSlotFormat, kSlotBlock, kSlotKind, kSlotStochastic, kSlotColumns };
enum PlanColumn {
  kRows,
  kCols,
  kGlobalCols,
  kFirst,
  kStream,
  kParamFormat,
  kNumel,
  kBatches,
  kInnerRows,
  kInnerCols,
  kGlobalInnerRows,
  kGlobalInnerCols,
  kSlot,  // kSlotColumns for each slot
  kDims = kSlot + static_cast<int>(kSlotColumns) * kMaxSlots,
  kMostDims = 6,
  kFront = kDims + 1 + kMostDims,
  kBack,
  kCut,
  kPlanColumns
};

/// Whether a scale of rank 1 has more than two dimensions: its columns are then several of them.
inline bool combines(const int64_t* row) { return row[kDims] > 2; }

/// The measured scales of one slot as state keeps them.
struct SlotState {
  std::vector<float*> most;  // one tensor for each kind but rank 1, which has one a dimension
};

/// A step's jobs, every tensor of them held against the plan.
struct Plan {
  int rule = 0;
  std::vector<Job> jobs;
  std::vector<SlotState> states;  // kMaxSlots for each job
  bool measures_scales = false;
  int phases = 0;  // before the update
};

/// The jobs of a step, every tensor held against the plan; nothing is written. State comes, for each
/// parameter, as: what the parameter format keeps beside it; for each slot its values and its scales
/// (one tensor, or one for each dimension where they are of rank 1); for each factored moment rows
/// and columns; the rule's numbers. Where `steps` and the single numbers lie is left to the
/// processors, which want them in different places.
Plan make_plan(const StepArgs& args);

/// The rule of that name, if it takes that many hyperparameters.
int checked_rule(const std::string& name, const std::vector<double>& hyper);

/// Sizes of the workspace tensors of a step: int64 sums of tensors, rows and columns, int32 maxima
/// of rows, columns and cut blocks, float32.
std::vector<int64_t> scratch_sizes(std::string rule, Tensor plan);

}  // namespace lowbit
