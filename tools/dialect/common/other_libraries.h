// What the dialects of other libraries share: access to entries, settings, reports and errors.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "dialect/common/dialect.h"
#include "dialect/numbers/document_leaves.h"
#include "dialect/numbers/numbers.h"
#include "dialect/requantize/blocks.h"
#include "dialect/tree/algorithm.h"
#include "dialect/tree/optimizer_tree.h"

namespace lowbit::ckpt {

/// The tensor of that name in an entry; null if there is none.
const Leaf* tensor_in(const Entry& entry, std::string_view name);
/// The plain value of that name in an entry. A value whose items the container stores as leaves is
/// put together again. Empty if there is none, or if it is a tensor.
std::optional<Value> value_in(const Entry& entry, std::string_view name);
/// A tuple, list or torch.Size of integers; empty if it is anything else.
std::optional<Shape> shape_in(const Entry& entry, std::string_view name);

/// Adds the step of an entry, if it has one, to the numbers of the parameter.
Status read_step(const Entry& entry, Param& param);
/// A state that one tensor of floating-point numbers holds.
State plain_state(const std::string& name, const Leaf& leaf);

/// The compensation of the weight, a state named "param_..."; null if there is none.
const State* beside_of(const Param& param);
/// The leaf of a compensation.
const Leaf& raw_of(const State& beside);
/// The group of each parameter; an empty group for a parameter without one.
std::vector<const Group*> groups_by_param(const Model& model);
/// A setting of a group as a number; empty if it is not a number.
std::optional<double> real_setting(const Group& group, std::string_view name);
bool has_setting(const Group& group, std::string_view name);
/// Sets a setting, or appends it.
void set_in(Settings& settings, const std::string& name, Value value);
/// Removes a setting and returns it; empty if there is none.
std::optional<Value> take_from(Settings& settings, std::string_view name);

/// Adds a state to the report: converted, or unchanged (`to` is what it was stored as).
StateReport* report_of(DialectReport& report, const Param& param, const State& state,
                       const std::string& to, bool exact);

/// The error if the shape of a parameter is needed and unknown.
Error no_shape(const Param& param);
/// The error if the values of a state cannot be known.
Error lost_values(const Param& param, const State& state);
/// The error if --keep is given and a state cannot become `whose` codes ("lpmm's") without
/// rounding.
Error would_round(const Param& param, const State& state, const std::string& whose);

/// An error if `whose` library has none of the model's algorithm among `its` own, or if the file is
/// torch's and its optimizer is unknown: states named like Adam's need not be Adam's. And as
/// `refuse_subspace`.
Status check_algorithm(const Model& model, const std::string& whose,
                       const std::set<std::string>& its);
/// The step that all parameters of a group have made, in whose state `whose` optimizer has none;
/// empty where none has state. An error where they differ.
Result<std::optional<int64_t>> step_of_group(const Model& model, const Group& group,
                                             const std::string& whose);
/// For a state that `whose` ("lpmm") optimizer does not have: an error, or a warning with --lossy.
Status leave_out(const Param& param, const State& state, const std::string& whose,
                 const Wanted& wanted, DialectReport& report);

/// Whether the name of a parameter matches a pattern of those that stay in full precision.
bool stays_full_precision(const Param& param, const Wanted& wanted);

}  // namespace lowbit::ckpt
