// The groups of an optimizer of Megatron-Core, which are in the common state without their
// parameters.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "dialect/model/model.h"

namespace lowbit::ckpt {

/// A group as the common state has it.
struct MegatronGroup {
  int64_t number = 0;  // in the order of the common state, over all optimizers
  Settings settings;   // without "step"
  std::optional<double> step = {};
};
/// By the number of the optimizer; "" where there is one.
using Groups = std::map<std::string, std::vector<MegatronGroup>>;
/// The groups of each optimizer; NeMo keeps the optimizer in a list of one. Of several optimizers,
/// groups that count no steps, as Muon's, have those of the others: Megatron-Core keeps all at one
/// step.
Result<Groups> megatron_groups(const Document& common);

/// The groups of all optimizers as those of one, "": whose parameters are in which optimizer is not
/// saved where the names of tensors have no prefix.
Groups chained_as_one(const Groups& groups);

/// A group with its parameters.
struct DecidedGroup {
  Settings settings;
  double step = 0;
  std::vector<std::string> params;
};
/// The groups of one optimizer whose parameters are `names`. `said` has pairs "N=PATTERN"
/// (Document::members): names that match are in group N, and all others in the one group that is
/// not named. Where nothing is said of these groups they are one, with what they agree on;
/// `undecided` names the settings on which they do not, and `warnings` those that Megatron alone
/// uses.
Result<std::vector<DecidedGroup>> decided_groups(const std::vector<MegatronGroup>& groups,
                                                 const std::vector<std::string>& names,
                                                 const std::vector<std::string>& said,
                                                 std::string& undecided,
                                                 std::vector<std::string>& warnings);

/// An error of usage where one of `said` is not "N=PATTERN", its group is not there, or its pattern
/// matches none of the names in that group's optimizer. `params`: the names, by optimizer.
Status check_members(const Groups& groups,
                     const std::map<std::string, std::vector<std::string>>& params,
                     const std::vector<std::string>& said);

}  // namespace lowbit::ckpt
