// The optimizer of a checkpoint, found by the names of its states, and its settings in torch and in
// lowbit.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dialect/model/model.h"

namespace lowbit::ckpt {

/// Whether states of that name have one number for each weight: "exp_avg", "momentum_buffer", ...
bool is_moment(const std::string& name);
/// NorMuon's state: a mean of squares for each row, in float32.
inline constexpr const char* kRowMoments = "second_momentum_buffer";
/// Whether such a state may be negative. A state with an unknown name may.
bool is_signed_state(const std::string& name);
/// Whether such a state is a copy of weights, which presets do not quantize.
bool is_weight_state(const std::string& name);
/// Whether such a state is a mean over thousands of steps, which presets keep as `slow_mean_spec`
/// says.
bool is_slow_state(const std::string& name);
/// A key of `lowbit_settings`: "adam" (AdamW too), "lion", "muon" (with AdamW beside it or not),
/// ...; "" if lowbit has no such optimizer.
std::string algorithm_of(const Model& model);
/// The optimizer that wrote the model, if its states are named like another's; else empty.
std::string other_rule_of(const Model& model);
/// Why no optimizer of `whose` ("lowbit") continues from the states of such an optimizer; empty for
/// any other.
std::string refusal_of_rule(const Model& model, const std::string& whose);
/// The error if no optimizer of `whose` ("lowbit") can continue from these states.
Error no_optimizer(const Model& model, const std::string& whose);
/// An error if a parameter's state is known to be of its gradient in a subspace: its number
/// "apollo_rank" says so. `whose` optimizers have none.
Status refuse_subspace(const Model& model, const std::string& whose);
/// Whether torch has no such optimizer, or only for some of the parameters: it gets the settings as
/// they are.
bool torch_lacks_optimizer(const Model& model);
/// The settings of an algorithm with torch.optim's defaults; empty if torch has no such optimizer.
const Settings& torch_settings(std::string_view algorithm);
/// The same with lowbit's defaults, without state_format and other settings that depend on the
/// user.
const Settings& lowbit_settings(std::string_view algorithm);
/// The settings of a group that are None where lowbit's optimizer of that algorithm needs a value.
std::vector<std::string> settings_without_value(const std::string& algorithm, const Group& group);
/// Whether some optimizer of torch or lowbit has a setting of that name.
bool is_setting(const std::string& name);
/// The settings of a group, without those that say how a library stores its state.
Settings settings_elsewhere(const Group& group);
/// The settings of `table`, with the group's values if it has them, followed by what the user added
/// to the group: initial_lr, param_names, ... Settings of one library alone are dropped.
Settings settings_of(const Group& group, const Settings& table);

}  // namespace lowbit::ckpt
