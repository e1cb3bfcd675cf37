// What the peers' dialects share beside the skeleton.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "dialect/algorithm.h"
#include "dialect/blocks.h"
#include "dialect/leaves.h"
#include "dialect/numbers.h"
#include "dialect/skeleton.h"

namespace lowbit::ckpt {

/// The tensor of that name in an entry; null where there is none.
const Leaf* tensor_in(const Entry& entry, std::string_view name);
/// A plain value in an entry, put together again where its container kept the items of lists and
/// dicts as leaves; nothing where there is none, or where it is a tensor.
std::optional<Value> value_in(const Entry& entry, std::string_view name);
/// A tuple, list or torch.Size of integers; nothing where it is something else.
std::optional<Shape> shape_in(const Entry& entry, std::string_view name);

/// The step of an entry, where it has one, as a number of the parameter.
Status read_step(const Entry& entry, Param& param);
/// A state that is one tensor of numbers.
State plain_state(const std::string& name, const Leaf& leaf);

/// What is kept beside the weight, a state named "param_..."; null where nothing is.
const State* beside_of(const Param& param);
/// The leaf of it.
const Leaf& raw_of(const State& beside);
/// The weight of a parameter among the other leaves or in the checkpoint with the weights, by its
/// name; null where it is in neither.
const Leaf* weight_of(const Model& model, const Param& param);
/// The group that each parameter is in; an empty one where it is in none.
std::vector<const Group*> groups_by_param(const Model& model);
/// A setting of a group as a number; nothing where it is none.
std::optional<double> real_setting(const Group& group, std::string_view name);
bool has_setting(const Group& group, std::string_view name);
/// Sets it, or adds it behind the others.
void set_in(Settings& settings, const std::string& name, Value value);
/// Takes it out; nothing where there was none.
std::optional<Value> take_from(Settings& settings, std::string_view name);

/// Adds a state that a dialect has put into other codes, or left as it was (`to` == `from`).
StateReport* report_of(DialectReport& report, const Param& param, const State& state,
                       const std::string& to, bool exact);

/// What is wrong where a parameter's shape is needed and nothing tells it.
Error no_shape(const Param& param);
/// What is wrong where --keep was given and a state cannot become `whose` codes ("lpmm's") as it is.
Error would_round(const Param& param, const State& state, const std::string& whose);

/// An error where torch wrote the file and its optimizer is not known: numbers with the names of Adam's
/// need not be Adam's.
Status check_algorithm(const Model& model, const std::string& whose);
/// For a state that has no place in `whose` ("lpmm") optimizer: an error, or a warning where --lossy
/// was given.
Status leave_out(const Param& param, const State& state, const std::string& whose,
                 const Wanted& wanted, DialectReport& report);

/// Whether the name of a parameter fits one of the patterns that stay float32.
bool stays_wide(const Param& param, const Wanted& wanted);

}  // namespace lowbit::ckpt
