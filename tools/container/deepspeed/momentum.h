// Where parameters lie in the momentum of DeepSpeed's own Muon, under ZeRO's stages 1 and 2
// (0.19.8: runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "container/deepspeed/layout.h"

namespace lowbit::ckpt {

/// A rank's momentum of a group that Muon steps.
struct RankMomentum {
  std::string what;            // for messages; empty where the rank has none
  uint64_t length = 0;         // of the momentum
  uint64_t unpadded = 0;       // of the rank's master weights,
  uint64_t padding = 0;        // which may lack so many elements at their end
  std::optional<bool> slices;  // whether the configuration asks for slices, where the file has it
};

/// Whether a group's momentum is of the slices that each rank has, as where the optimizer is
/// offloaded, and under BF16_Optimizer; empty where the file does not tell.
std::optional<bool> configured_for_slices(const PartFile& file);

/// Whether Muon steps the parameters of a flat vector. `groups`: where the file has param_groups.
bool is_stepped_by_muon(const PartFile& file, const Path& groups, size_t flat);

/// Whether momentum is of whole parameters, all those of which the rank has a slice, one after the
/// other; false where it is of the slices. The vectors' lengths tell, and where they fit both, the
/// configuration. `lengths` has all parameters of the ranks' fragments, which are in the order in
/// which they lie.
Result<bool> holds_whole_parameters(const Lengths& lengths, const std::vector<RankVector>& ranks,
                                    const std::vector<RankMomentum>& momenta);

}  // namespace lowbit::ckpt
