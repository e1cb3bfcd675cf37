// The workspace that several phases of one step share: checked, and given to jobs.
#pragma once

#include <array>
#include <cstdint>

#include "ops/ops.h"
#include "policy/workspace.h"

namespace lowbit {

/// The tensors of a workspace. It holds nothing between steps. All null where none was given.
struct Workspace {
  std::array<void*, kWorkspaceTensors> data{};
  /// Number `offset` of a tensor.
  template <class T>
  T* at(WorkspaceTensor tensor, int64_t offset) const {
    return data[tensor] ? static_cast<T*>(data[tensor]) + offset : nullptr;
  }
};

/// Numbers in each tensor.
using WorkspaceSizes = std::array<int64_t, kWorkspaceTensors>;

/// The workspace that is given; no tensor is none.
Workspace checked_workspace(const Tensors& tensors);
/// Refuses a workspace that is shorter than its jobs need, or elsewhere.
void check_sizes(const Tensors& tensors, const WorkspaceSizes& sizes, const Device& device);
/// Gives a job its part of the workspace behind `ends`, and moves those.
///
/// combines: whether a scale of rank 1 has more than two dimensions.
void place(Job& job, const RuleInfo& rule, bool combines, const Workspace& workspace,
           WorkspaceSizes& ends);

}  // namespace lowbit
