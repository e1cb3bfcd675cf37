#include "dialect/common/other_libraries.h"

#include <algorithm>
#include <set>

#include "dialect/model/parameter_names.h"
#include "dialect/numbers/floats.h"
#include "io/text.h"

namespace lowbit::ckpt {

const Leaf* tensor_in(const Entry& entry, std::string_view name) {
  const Leaf* leaf = entry.find(name);
  return leaf != nullptr && leaf->kind == Leaf::Kind::kTensor ? leaf : nullptr;
}

std::optional<Value> value_in(const Entry& entry, std::string_view name) {
  if (const Leaf* leaf = entry.find(name))
    return leaf->kind == Leaf::Kind::kValue ? std::optional(leaf->value) : std::nullopt;
  // Inside a value that is one leaf: "exp_avg_qstate.enable".
  for (size_t dot = name.rfind('.'); dot != std::string_view::npos && dot > 0;
       dot = name.rfind('.', dot - 1)) {
    const Leaf* leaf = entry.find(name.substr(0, dot));
    if (leaf == nullptr || leaf->kind != Leaf::Kind::kValue) continue;
    const Value* at = &leaf->value;
    for (size_t from = dot + 1; at != nullptr && from <= name.size();) {
      const size_t to = std::min(name.find('.', from), name.size());
      at = at->find(name.substr(from, to - from));
      from = to + 1;
    }
    return at == nullptr ? std::nullopt : std::optional(*at);
  }
  // Items that are leaves: "row_var_shape.0".
  Value out = Value::tuple({});
  for (const auto& [key, leaf] : entry.leaves) {
    if (leaf->kind == Leaf::Kind::kValue && key.size() > name.size() && key.starts_with(name) &&
        key[name.size()] == '.')
      out.items.push_back(leaf->value);
  }
  return out.items.empty() ? std::nullopt : std::optional(out);
}

std::optional<Shape> shape_in(const Entry& entry, std::string_view name) {
  const auto value = value_in(entry, name);
  if (!value || !value->is_row()) return std::nullopt;
  Shape shape;
  for (const Value& item : value->items) {
    if (!item.is(Value::Kind::kInt) || item.integer < 0) return std::nullopt;
    shape.push_back(item.integer);
  }
  return shape;
}

Status read_step(const Entry& entry, Param& param) {
  const Leaf* step = entry.find("step");
  if (step == nullptr) return fine();
  ASSIGN_OR_RETURN(number, number_of(*step));
  param.numbers.emplace_back("step", std::move(number));
  return fine();
}

State plain_state(const std::string& name, const Leaf& leaf) {
  State s;
  s.name = name;
  s.shape = leaf.shape;
  s.is_signed = is_signed_state(name);
  s.stored_as = leaf.dtype->name;
  s.bytes = leaf.bytes();
  s.values = floats_of(leaf);
  s.leaves = {&leaf};
  return s;
}

std::vector<const Group*> groups_by_param(const Model& model) {
  static const Group kNone;
  std::vector<const Group*> out(model.params.size(), &kNone);
  for (const Group& group : model.groups) {
    for (const size_t p : group.params) out[p] = &group;
  }
  return out;
}

Error no_shape(const Param& param) {
  return bad(shown(param) +
             ": its shape is nowhere in the checkpoint; give the weights with --model");
}

Error lost_values(const Param& param, const State& state) {
  return bad(shown(param) + ": " + printable(state.name) + " is " + state.stored_as +
             ", whose values cannot be recovered");
}

Error would_round(const Param& param, const State& state, const std::string& whose) {
  return mismatch(shown(param) + ", " + state.name + ": " + state.stored_as + " cannot become " +
                  whose + " codes without rounding; leave --keep out to allow it");
}

Status check_algorithm(const Model& model, const std::string& whose,
                       const std::set<std::string>& its) {
  RETURN_IF_ERROR(refuse_subspace(model, whose));
  const bool any =
      std::ranges::any_of(model.params, [](const Param& p) { return !p.states.empty(); });
  // Of the others' files each state says what it is.
  const std::string& is = model.algorithm;
  const bool known = is.empty() ? model.dialect != "torch" : its.contains(is);
  return any && !known ? Status(no_optimizer(model, whose)) : fine();
}

Result<std::optional<int64_t>> step_of_group(const Model& model, const Group& group,
                                             const std::string& whose) {
  std::optional<int64_t> step;
  for (const size_t i : group.params) {
    const Param& p = model.params[i];
    if (p.states.empty()) continue;
    const Value* number = number_in(p, "step");
    if (number == nullptr) return bad(shown(p) + ": has no step");
    ASSIGN_OR_RETURN(count, whole_of(*number, shown(p) + ": step"));
    if (step && *step != count)
      return bad(shown(p) + ": has made " + std::to_string(count) +
                 " steps, another of its group " + std::to_string(*step) + "; " + whose +
                 " counts the steps of a whole group");
    step = count;
  }
  return step;
}

Status leave_out(const Param& param, const State& state, const std::string& whose,
                 const Wanted& wanted, DialectReport& report) {
  const std::string text = shown(param) + ": " + whose + " keeps no " + printable(state.name);
  if (!wanted.lossy) return bad(text + "; --lossy leaves it out");
  report.warnings.push_back(text + ": it is left out");
  return fine();
}

const State* beside_of(const Param& param) {
  for (const State& s : param.states) {
    if (s.name.starts_with("param_")) return &s;
  }
  return nullptr;
}

const Leaf& raw_of(const State& beside) { return beside.raw ? *beside.raw : *beside.leaves[0]; }

std::optional<double> real_setting(const Group& group, std::string_view name) {
  const Value* said = setting(group, name);
  const auto real = said == nullptr ? bad("") : real_of(*said, "");
  return real.ok() ? std::optional(real.value()) : std::nullopt;
}

bool has_setting(const Group& group, std::string_view name) {
  return setting(group, name) != nullptr;
}

void set_in(Settings& settings, const std::string& name, Value value) {
  for (auto& [key, old] : settings) {
    if (key == name) {
      old = std::move(value);
      return;
    }
  }
  settings.emplace_back(name, std::move(value));
}

std::optional<Value> take_from(Settings& settings, std::string_view name) {
  for (auto at = settings.begin(); at != settings.end(); ++at) {
    if (at->first == name) {
      Value value = std::move(at->second);
      settings.erase(at);
      return value;
    }
  }
  return std::nullopt;
}

StateReport* report_of(DialectReport& report, const Param& param, const State& state,
                       const std::string& to, bool exact) {
  report.states.push_back({.param = shown(param),
                           .state = state.name,
                           .from = state.stored_as,
                           .to = to,
                           .exact = exact});
  return &report.states.back();
}

bool stays_full_precision(const Param& param, const Wanted& wanted) {
  return name_fits(param.name, wanted.full_precision);
}

}  // namespace lowbit::ckpt
