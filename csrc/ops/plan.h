// The plan of a step, checked and made into jobs: the same for both processors.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/ops.h"
#include "policy/plan.h"

namespace lowbit {

/// The tensors that a step takes and that stay from one step to the next, and their plan.
struct StepTensors {
  int64_t rule;  // its number in the catalog
  const Tensors &params, &state, &steps;
  const Tensor& plan;
};

/// The cross-tile scales of one slot as state keeps them.
struct SlotState {
  std::vector<float*> absmax;  // one tensor for each kind but rank 1, which has one a dimension
  std::vector<int64_t> dims;   // of rank 1: the length of each
  /// Whether a scale of rank 1 has more than two dimensions: its columns are then several of them.
  bool combines() const { return dims.size() > 2; }
};

/// A step's jobs, every tensor of state checked against the plan.
struct Plan {
  int rule = 0;
  Device device;
  std::vector<Job> jobs;           // bind_tensors and bind_call set what changes between steps
  std::vector<SlotState> states;   // kMaxSlots for each job
  std::vector<float*> steps;       // the count of steps of each job
  std::vector<const void*> grads;  // of each job, side by side
  bool has_cross_tile_scales = false;
  bool moved = false;  // whether a job got more than another gradient, as aligned as the one before
  bool overlaps = false;  // whether parameters share memory since they were bound again
  int phases = 0;         // before the update
  explicit Plan(const Device& on) : device(on) {}
};

/// The jobs of a step; nothing is written. State comes, for each parameter, as: the compensation
/// that its format keeps; for each slot its values and its scales (one tensor, or one for each
/// dimension where they are of rank 1); for each factored moment rows and columns; the rule's
/// numbers.
Plan make_plan(const StepTensors& tensors);

/// Gives the jobs their parameters and gradients.
///
/// Raises: a tensor that does not fit, or parameters that share memory.
void bind_tensors(Plan& plan, const Tensors& params, const Tensors& grads);
/// The same. Returns false where a tensor does not fit or is not where the plan is, or where
/// parameters share memory now: the plan is of no more use.
bool bind_pairs(Plan& plan, const Tensors& params, const Tensors& grads);
/// Gives the jobs the addresses that the rows of a table have: parameters and gradients that have
/// not changed but for where they are. Returns false where parameters share memory now: the plan
/// is of no more use.
///
/// Raises: a row of another length than its job, or without an address.
bool bind_table(Plan& plan, const Tensor& table);

/// Raises where the rule takes another number of hyperparameters.
void check_hyper(const RuleInfo& rule, const std::vector<double>& hyper);

/// The rule of that number.
int checked_rule(const char* op, int64_t number);

/// Brings what a tensor knows of itself into the caches.
inline void touch(const Tensor& t) {
  const void* p = t.const_data_ptr();
  asm volatile("" ::"r"(p));
}
constexpr size_t kTouchAhead = 16;
/// For a loop over tensors that is at number i: touches the next ones at once, so that their memory
/// arrives side by side.
inline void touch_ahead(const Tensors& tensors, size_t i) {
  if (i % kTouchAhead != 0) return;
  for (size_t j = i; j < std::min(i + kTouchAhead, tensors.size()); ++j) touch(tensors[j]);
}

/// Lengths of the workspace's tensors (policy/workspace.h) for a step.
std::vector<int64_t> workspace_sizes(int64_t rule, Tensor plan);

/// Where in the workspace a phase measures numbers of one parameter that ranks share: for each
/// Region its tensor, begin, width and rows. plan: the parameter's row.
std::vector<int64_t> workspace_regions(int64_t rule, Tensor plan, int64_t phase);

}  // namespace lowbit
