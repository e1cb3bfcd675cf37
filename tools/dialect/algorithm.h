// Which optimizer a checkpoint is of, by the names of its states, and the settings that its groups
// have in torch and here.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "dialect/model.h"

namespace lowbit::ckpt {

/// Whether states of that name have an entry for each weight: "exp_avg", "momentum_buffer", ...
bool is_moment(const std::string& name);
/// Whether such a state has negative values. Names that are not known have.
bool is_signed_state(const std::string& name);
/// "adam" (AdamW too), "sgd", "adafactor", "rmsprop", "adagrad", "lion", "ademamix", "lars", "came";
/// "" where the names are nobody's that lowbit has.
std::string algorithm_of(const Model& model);
/// What is wrong where none of `whose` ("lowbit") optimizers goes on from these states.
Error no_optimizer(const Model& model, const std::string& whose);
/// Their settings with the defaults of torch.optim; empty where torch has no such optimizer.
const Settings& torch_settings(const std::string& algorithm);
/// The same of lowbit, without state_format and what else depends on the user.
const Settings& lowbit_settings(const std::string& algorithm);
/// The group's settings but for those by which a library says how it keeps state.
Settings settings_elsewhere(const Group& group);
/// `table` with the group's values where it has them, and behind them what the user has put into the
/// group: initial_lr, param_names, ... Settings that only some optimizer library knows are dropped.
Settings settings_of(const Group& group, const Settings& table);

}  // namespace lowbit::ckpt
