// The workspace that several phases of one step share.
#pragma once

#include <array>
#include <cstdint>

#include "ops.h"

namespace lowbit {

/// What the phases share: it holds nothing between steps. All null where none was given.
struct Scratch {
  int64_t *totals = nullptr, *rows = nullptr, *cols = nullptr;
  uint32_t *row_most = nullptr, *col_most = nullptr, *blocks = nullptr;
  float* floats = nullptr;
};

/// Lengths of the workspace's parts.
struct ScratchSize {
  int64_t totals = 0, rows = 0, cols = 0, row_most = 0, col_most = 0, blocks = 0, floats = 0;
  /// In the order of the tensors.
  std::array<int64_t, 7> list() const {
    return {totals, rows, cols, row_most, col_most, blocks, floats};
  }
};

/// The parts of the workspace that is given; no tensor is none.
Scratch checked_scratch(const Tensors& tensors);
/// Refuses a workspace that is shorter than its jobs need, or elsewhere.
void check_scratch(const Tensors& tensors, const ScratchSize& size, const Device& device);
/// Gives a job its part of the workspace, and counts it. `row`: the job's row of the plan.
void place(Job& job, const RuleInfo& rule, const int64_t* row, const Scratch& s, ScratchSize& at);

}  // namespace lowbit
