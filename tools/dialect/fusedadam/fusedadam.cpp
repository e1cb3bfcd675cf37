// The dialect of FusedAdam of Transformer Engine (2.20, pytorch/optimizers/fused_adam.py) and of
// Apex: state as torch's Adam, steps in the groups.
//
//   state.<i>  exp_avg, exp_avg_sq: float32 in every file, because state_dict() multiplies float16
//              and fp8 moments with their scales;
//              master_param: the float32 weight, or int16, its low half (store_param_remainders)
//   group      lr, bias_correction, betas, eps, weight_decay, step
#include <algorithm>

#include "dialect/common/other_libraries.h"
#include "dialect/requantize/master.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

Result<int> recognize_fused(const Document& /*document*/, const OptimizerTree& tree) {
  if (tree.groups.empty() || tree.view != nullptr) return 0;
  for (const Group& group : tree.groups) {
    if (!has_setting(group, "bias_correction")) return 0;
  }
  const bool stepped =
      std::ranges::any_of(tree.groups, [](const Group& g) { return has_setting(g, "step"); });
  bool any = false;
  for (const Entry& entry : tree.params) {
    if (entry.find("step") != nullptr) return 0;
    any |= tensor_in(entry, "exp_avg") != nullptr && tensor_in(entry, "exp_avg_sq") != nullptr;
  }
  return any && stepped ? 3 : 0;
}

Result<Model> read_fused(std::shared_ptr<const Document> document, const OptimizerTree& tree) {
  OptimizerTree plain = tree;
  size_t halves = 0;
  for (Entry& entry : plain.params) {
    halves += std::erase_if(entry.leaves, [](const auto& leaf) {
      return is_master(leaf.first) && leaf.second->kind == Leaf::Kind::kTensor &&
             leaf.second->dtype->name == std::string_view("int16");
    });
  }
  ASSIGN_OR_RETURN(model, find_dialect("torch")->read(std::move(document), plain));
  model.dialect = "fusedadam";
  if (halves > 0)
    model.unresolved.push_back(std::to_string(halves) +
                               " parameters have the low half of their float32 weight in "
                               "master_param (store_param_remainders), which has no place here");
  for (Group& group : model.groups) {
    const auto step = take_from(group.settings, "step");
    take_from(group.settings, "bias_correction");
    std::erase_if(group.tensors, [](const auto& t) { return t.first[0].text() == "step"; });
    for (const size_t i : group.params) {
      Param& p = model.params[i];
      if (p.states.empty()) continue;
      if (!step) return bad(shown(p) + ": has moments, and its group has no step");
      p.numbers.emplace_back("step", *step);
    }
  }
  // float32 weights: `convert --weights` puts them into the model, and no state is kept of them.
  size_t masters = 0;
  for (Param& p : model.params)
    masters += std::erase_if(p.states, [](const State& s) { return is_master(s.name); });
  if (masters > 0)
    model.unresolved.push_back("it has " + std::to_string(masters) +
                               " float32 master weights, which --weights takes over where the "
                               "parameters have names (--model)");
  model.algorithm = algorithm_of(model);
  return model;
}

Result<Document> write_fused(const Model& model, const Wanted& wanted, DialectReport& report) {
  if ((!wanted.state_format.empty() && wanted.state_format != "float32") || wanted.block != 0)
    return usage(
        "files of FusedAdam have float32 state without blocks, whatever it keeps while it "
        "runs; leave --state-format and --block out");
  RETURN_IF_ERROR(check_algorithm(model, "FusedAdam", {"adam"}));
  if (!model.algorithm.empty() && model.algorithm != "adam")
    return no_optimizer(model, "FusedAdam");
  Document out = begun(model);
  out.leaves = model.rest;
  for (const Param& p : model.params) {
    for (const State& s : p.states) {
      if (s.name != "exp_avg" && s.name != "exp_avg_sq") {
        RETURN_IF_ERROR(leave_out(p, s, "FusedAdam", wanted, report));
        continue;
      }
      if (s.values == nullptr) return lost_values(p, s);
      if (!p.known_shape) return no_shape(p);
      out.leaves.push_back(float32_leaf(state_path(model, p, s.name), s, s.shape));
      report_of(report, p, s, "float32", true);
    }
  }
  const auto settings_for = [&](const Group& group) -> Result<Settings> {
    Settings made;
    const Settings& torch = torch_settings("adam");
    for (auto& [name, value] : settings_of(group, torch)) {
      const bool adam = name == "lr" || name == "betas" || name == "eps" || name == "weight_decay";
      const bool known =
          std::ranges::any_of(torch, [&](const auto& setting) { return setting.first == name; });
      if (adam || !known) made.emplace_back(name, value);  // and what is the user's own
    }
    made.emplace_back("bias_correction", Value::boolean(true));
    ASSIGN_OR_RETURN(step, step_of_group(model, group, "FusedAdam"));
    if (step) made.emplace_back("step", Value::number(*step));
    return made;
  };
  if (model.flattened)
    return bad("FusedAdam keeps steps in its groups, which a flattened state dict does not have");
  RETURN_IF_ERROR(add_groups(model, settings_for, out.leaves));
  return out;
}

}  // namespace

extern const Dialect kFusedAdam = {
    "fusedadam",
    "FusedAdam of Transformer Engine and Apex, whose files are float32",
    recognize_fused,
    read_fused,
    write_fused,
    {},
    {.coupled = "continue with FusedAdam(adam_w_mode=False)"}};

}  // namespace lowbit::ckpt
