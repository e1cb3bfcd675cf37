// Where parameters lie in the flat vectors of ZeRO's stages 1 and 2, which ranks cut into equal
// parts.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "container/deepspeed/model_states.h"

namespace lowbit::ckpt {

/// A parameter's slice of a rank's vector.
struct Fragment {
  std::string name;
  uint64_t first, count;
  bool operator==(const Fragment&) const = default;
};

/// What a rank has of a flat vector.
struct RankVector {
  uint64_t length = 0;
  std::vector<Fragment> fragments;  // as param_slice_mappings has them
};

/// The elements of each parameter of a flat vector.
using Lengths = std::map<std::string, uint64_t>;
Lengths lengths_of(const FlatGroup& group);

/// What `parameter_alignment` leaves free behind each of a group's `count` parameters, in a rank's
/// file; empty where it does not say.
Result<std::vector<uint64_t>> read_paddings(const PartFile& file, size_t group, size_t count);

/// The parameters' shapes come in the order in which they lie one after the other, with `paddings`
/// behind them (none: without). True if the ranks' fragments say the same.
///
/// DeepSpeed 0.19.8 gets them wrong under round_robin_gradients: it deals the parameters out to the
/// ranks again, and takes their slices from the order before. Such fragments are put right.
bool lie_in_order(const FlatGroup& group, const std::vector<uint64_t>& paddings,
                  std::vector<RankVector>& ranks);

}  // namespace lowbit::ckpt
