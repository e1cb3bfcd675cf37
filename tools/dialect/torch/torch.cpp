// The dialect of torch's own optimizers: float state, into which every other dialect can be
// converted.
#include <algorithm>

#include "dialect/common/dialect.h"
#include "dialect/common/other_libraries.h"
#include "dialect/common/settings_kept.h"
#include "dialect/model/formats.h"
#include "dialect/numbers/document_leaves.h"
#include "dialect/numbers/floats.h"
#include "dialect/numbers/numbers.h"
#include "dialect/tree/algorithm.h"
#include "dialect/tree/optimizer_tree.h"
#include "io/text.h"
#include "pickle/plain.h"

namespace lowbit::ckpt {
namespace {

bool is_float(const Leaf& leaf) {
  if (leaf.kind != Leaf::Kind::kTensor || leaf.source == nullptr) return false;
  const std::string_view dtype = leaf.dtype->name;
  return dtype == "float32" || dtype == "bfloat16" || dtype == "float16" || dtype == "float64";
}

/// Whether a tensor of that name is state of a torch optimizer: a moment, or one that lowbit lacks.
bool is_torch_state(const std::string& name) {
  for (const char* known :
       {"row_var", "col_var", "exp_inf", "prev", "step_size", "acc_delta", "ax"}) {
    if (name == known) return true;
  }
  return is_moment(name);
}

Result<int> recognize_torch(const Document& /*document*/, const OptimizerTree& tree) {
  // A Muon that says `ns_steps` or `use_muon` without torch's coefficients is another library's.
  for (const Group& group : tree.groups) {
    const bool muon =
        setting(group, "ns_steps") != nullptr || setting(group, "use_muon") != nullptr;
    if (muon && setting(group, "ns_coefficients") == nullptr) return 0;
  }
  bool any = false;
  for (const Entry& entry : tree.params) {
    for (const auto& [name, leaf] : entry.leaves) {
      if (!is_torch_state(name)) continue;
      if (leaf->kind == Leaf::Kind::kValue && leaf->value.is(Value::Kind::kNone)) continue;
      if (!is_float(*leaf)) return 0;
      any = true;
    }
  }
  if (any) return 2;
  return tree.groups.empty() ? 0 : 1;  // a plain SGD keeps nothing
}

Result<Model> read(std::shared_ptr<const Document> document, const OptimizerTree& tree) {
  Model out = model_of(tree, "torch", document);
  for (size_t i = 0; i < out.params.size(); ++i) {
    Param& p = out.params[i];
    for (const auto& [name, leaf] : tree.params[i].leaves) {
      if (leaf->kind == Leaf::Kind::kValue) {
        if (!leaf->value.is(Value::Kind::kNone)) p.numbers.emplace_back(name, leaf->value);
        continue;
      }
      const bool counts = name == "step" ? volume(leaf->shape) == 1 : leaf->shape.empty();
      if (!is_torch_state(name) && leaf->kind == Leaf::Kind::kTensor && counts) {
        ASSIGN_OR_RETURN(number, number_of(*leaf));
        p.numbers.emplace_back(name, std::move(number));
        continue;
      }
      if (leaf->kind == Leaf::Kind::kOpaque)
        return bad(printable(leaf->name()) + ": is opaque (" + opaque_names(leaf->value) +
                   "), and the optimizer cannot continue without it");
      if (!is_float(*leaf))
        return bad(printable(leaf->name()) +
                   ": is not a tensor of floating-point numbers, so it is not "
                   "torch's; convert --from says whose it is");
      State s = plain_state(name, *leaf);
      if (name == "row_var" || name == "col_var") {
        s.name = name == "row_var" ? "variance_row" : "variance_col";
        const size_t extra = s.shape.size() - (name == "row_var" ? 1 : 2);
        if (s.shape.size() < 2 || s.shape[extra] != 1)
          return bad(printable(leaf->name()) + ": has shape " + shape_text(s.shape) +
                     ", which is none of Adafactor's");
        s.shape.erase(s.shape.begin() + static_cast<std::ptrdiff_t>(extra));
      } else if (is_moment(name)) {
        if (p.known_shape && p.shape != s.shape)
          return bad(printable(leaf->name()) + ": has shape " + shape_text(s.shape) +
                     ", another state of its parameter " + shape_text(p.shape));
        p.learn(s.shape);
      }
      s.is_signed = is_signed_state(s.name);
      if (is_float32(*leaf) && s.name == name) s.own = {{name, *leaf}};
      p.states.push_back(std::move(s));
    }
    const auto named = [&](const char* name) {
      return std::ranges::find_if(p.states, [&](const State& s) { return s.name == name; });
    };
    const auto row = named("variance_row"), col = named("variance_col");
    if (!p.known_shape && row != p.states.end() && col != p.states.end())
      p.learn(shape_of_means(row->shape, col->shape));
  }
  out.algorithm = algorithm_of(out);
  for (const Group& group : out.groups) {  // of FusedAdam, CPUAdam and Megatron-Core
    const Value* corrected = setting(group, "bias_correction");
    if (corrected != nullptr && corrected->is(Value::Kind::kBool) && corrected->integer == 0)
      return bad("its Adam ran with bias_correction=False, which no other Adam here has");
  }
  if (out.algorithm != "schedule_free") return out;
  for (const Group& group : out.groups) {  // which count the steps
    const Value* steps = setting(group, "k");
    for (const size_t i : group.params) {
      Param& p = out.params[i];
      if (steps != nullptr && !p.states.empty() && number_in(p, "step") == nullptr)
        p.numbers.emplace_back("step", *steps);
    }
  }
  return out;
}

/// The leaf of a state under torch's name, shape and dtype.
Leaf state_leaf(const Model& model, const Param& p, const State& s) {
  std::string name = s.name;
  Shape shape = s.shape;
  if (name == "variance_row") {
    name = "row_var";
    shape.push_back(1);
  } else if (name == "variance_col") {
    name = "col_var";
    shape.insert(shape.end() - 1, 1);
  }
  // A float64 parameter's state is float64 in torch too.
  if (is_float64(s))
    return tensor_leaf(state_path(model, p, name), s.leaves[0]->dtype, shape, s.leaves[0]->source);
  return float32_leaf(state_path(model, p, name), s, shape);
}

Result<Document> write(const Model& model, const Wanted& wanted, DialectReport& report) {
  if ((!wanted.state_format.empty() && wanted.state_format != "float32") || wanted.block != 0)
    return usage(
        "torch's optimizers keep state in float32 without blocks; leave --state-format and "
        "--block out, or take another --to");
  RETURN_IF_ERROR(refuse_subspace(model, "torch"));
  Document out = begun(model);
  out.leaves = model.rest;
  static const Settings kNone;
  const Settings& table = torch_lacks_optimizer(model) ? kNone : torch_settings(model.algorithm);
  if (table.empty() && model.dialect != "torch")
    report.warnings.push_back(
        "torch has no optimizer with these states: they are kept in float32 under "
        "their names, and settings as they are");
  for (const Param& p : model.params) {
    if (const Value* step = number_in(p, "step"); step != nullptr && model.algorithm != "sgd" &&
                                                  (model.algorithm != "muon" || table.empty())) {
      ASSIGN_OR_RETURN(count, real_of(*step, shown(p) + ": step"));
      out.leaves.push_back(scalar_leaf(state_path(model, p, "step"), static_cast<float>(count)));
    }
    for (const auto& [name, value] : p.numbers) {
      if (name == "step" || !table.empty() || model.dialect != "torch") continue;
      const auto real = real_of(value, name);
      out.leaves.push_back(
          real.ok() ? scalar_leaf(state_path(model, p, name), static_cast<float>(real.value()))
                    : value_leaf(state_path(model, p, name), value));
    }
    for (const State& s : p.states) {
      if (&s == beside_of(p)) {
        RETURN_IF_ERROR(leave_out(p, s, "torch", wanted, report));
        continue;
      }
      if (s.values == nullptr) return lost_values(p, s);
      if (!p.known_shape && s.codes)
        return bad(shown(p) + ": the checkpoint does not tell its shape; give the one with its " +
                   "weights as --model PATH");
      if (!table.empty() && model.algorithm != "adafactor" &&
          (s.name.ends_with("_row") || s.name.ends_with("_col")))
        return bad(shown(p) + ": " + s.name + " is a mean of rows or columns, from which torch's " +
                   s.name.substr(0, s.name.size() - 4) + " cannot be made");
      out.leaves.push_back(state_leaf(model, p, s));
      report_of(report, p, s, is_float64(s) ? "float64" : "float32", true);
    }
  }
  const auto settings_for = [&](const Group& group) {
    if (table.empty()) return group.settings;
    Settings made = settings_of(group, table);
    // Its Adam and its AdamW have each their own where a group has none.
    if (model.algorithm == "adam" && !decouples(model, group).has_value())
      take_from(made, "decoupled_weight_decay");
    return made;
  };
  RETURN_IF_ERROR(add_groups(model, settings_for, out.leaves));
  return out;
}

}  // namespace

extern const Dialect kTorchDialect = {
    "torch", "torch.optim's Adam, AdamW, SGD, Adafactor, RMSprop, Adagrad and Muon, in float32",
    recognize_torch, read, write};

}  // namespace lowbit::ckpt
