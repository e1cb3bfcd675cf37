// Reading Muon's state of other libraries, as an average of gradients and under torch's names.
#include <algorithm>
#include <set>

#include "dialect/common/other_libraries.h"
#include "dialect/muon/muon.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

bool has_state(const OptimizerTree& tree, std::string_view name) {
  return std::ranges::any_of(tree.params,
                             [&](const Entry& entry) { return tensor_in(entry, name) != nullptr; });
}

bool any_group(const OptimizerTree& tree, std::string_view name) {
  return std::ranges::any_of(tree.groups,
                             [&](const Group& group) { return has_setting(group, name); });
}

/// Whether the groups have exactly these settings, but for what programs add.
bool exactly(const OptimizerTree& tree, const std::set<std::string>& known) {
  return std::ranges::all_of(tree.groups, [&](const Group& group) {
    std::set<std::string> found;
    for (const auto& [name, value] : group.settings) {
      if (name != "initial_lr" && name != "param_names") found.insert(name);
    }
    return found == known;
  });
}

/// A Muon of torch's or lowbit's own says more in its groups.
bool is_ours(const OptimizerTree& tree) {
  return any_group(tree, "lowbit_version") || any_group(tree, "ns_coefficients");
}

/// Groups of a Muon that leaves open whether its momentum is a sum, as versions of one program
/// differ in it: with `ns_steps`, or `nesterov` beside `use_muon`. An optimizer of few settings may
/// be one that keeps an average, or an SGD.
enum class Open { kNo, kSumOrAverage, kAverageOrSgd };
Open left_open(const OptimizerTree& tree) {
  if (is_ours(tree) || tree.groups.empty() || !has_state(tree, "momentum_buffer")) return Open::kNo;
  if (any_group(tree, "wd") && any_group(tree, "adamw_betas")) return Open::kNo;
  if (any_group(tree, "ns_steps")) return Open::kSumOrAverage;
  if (any_group(tree, "use_muon"))
    return any_group(tree, "nesterov") ? Open::kSumOrAverage : Open::kNo;
  const bool few = exactly(tree, {"lr", "weight_decay", "momentum"});
  return few && !has_state(tree, "step") ? Open::kAverageOrSgd : Open::kNo;
}

/// Reads a model from the tree.
class Reader {
 public:
  Reader(MuonKind kind, const OptimizerTree& tree, Model& out)
      : kind_(kind), names_(names_of(kind)), tree_(tree), out_(out) {}

  Status run() {
    by_muon_.assign(out_.params.size(), false);
    const std::vector<const Group*> groups = groups_by_param(out_);
    for (size_t i = 0; i < out_.params.size(); ++i)
      RETURN_IF_ERROR(param(tree_.params[i], *groups[i], out_.params[i], i));
    std::vector<Group> made;
    for (const Group& group : out_.groups) {
      for (const bool muon : {true, false}) {
        Group part;
        std::copy_if(group.params.begin(), group.params.end(), std::back_inserter(part.params),
                     [&](size_t p) { return by_muon_[p] == muon; });
        if (part.params.empty()) continue;
        settings(group, muon, part);
        made.push_back(std::move(part));
      }
    }
    out_.groups = std::move(made);
    warn();
    return fine();
  }

 private:
  /// Whether Muon steps a parameter.
  Result<bool> is_muon(const Entry& entry, const Group& group) const {
    if (kind_ == MuonKind::kDion) {
      const Value* said = setting(group, "algorithm");
      if (said == nullptr || !said->is(Value::Kind::kText) ||
          (said->text != "muon" && said->text != "adamw"))
        return bad(shown(entry) + ": the algorithm of its group is " +
                   (said == nullptr ? "missing" : "'" + printable(said->text) + "'") +
                   "; of Dion's, 'muon' and 'adamw' can be converted");
      return said->text == "muon";
    }
    if (const auto said = value_in(entry, "use_muon")) return said->is_on();
    if (const Value* said = setting(group, "use_muon")) return said->is_on();
    if (tensor_in(entry, names_.first) != nullptr) return false;
    return true;
  }

  Status param(const Entry& entry, const Group& group, Param& param, size_t place) {
    ASSIGN_OR_RETURN(muon, is_muon(entry, group));
    by_muon_[place] = muon;
    for (const auto& [name, leaf] : entry.leaves) {
      if (leaf->kind == Leaf::Kind::kValue &&
          (name == "use_muon" || leaf->value.is(Value::Kind::kNone)))
        continue;
      if (name == "step") {
        RETURN_IF_ERROR(read_step(entry, param));
        continue;
      }
      const std::string known = muon && name == names_.momentum  ? "momentum_buffer"
                                : !muon && name == names_.first  ? "exp_avg"
                                : !muon && name == names_.second ? "exp_avg_sq"
                                                                 : "";
      if (known.empty() || leaf->kind != Leaf::Kind::kTensor)
        return bad(shown(param) + ", " + printable(name) + ": is nothing that " + names_.whose +
                   " keeps of a parameter that " + (muon ? "Muon" : "AdamW") + " steps");
      State state = plain_state(known, *leaf);
      if (param.known_shape && param.shape != state.shape)
        return bad(printable(leaf->name()) + ": has shape " + shape_text(state.shape) +
                   ", another state of its parameter " + shape_text(param.shape));
      if (muon && names_.sum) {
        ASSIGN_OR_RETURN(mu, momentum_of(group, param));
        state.values = scaled_floats(state.values, 1.0 - mu);
        state.rescaled = true;
        state.stored_as += ", a sum of gradients";
      } else if (is_float32(*leaf)) {
        state.own = {{known, *leaf}};
      }
      param.learn(state.shape);
      param.states.push_back(std::move(state));
    }
    if (kind_ == MuonKind::kDion && !param.states.empty() && number_in(param, "step") == nullptr) {
      if (const Value* step = setting(group, "step")) param.numbers.emplace_back("step", *step);
    }
    return fine();
  }

  Result<double> momentum_of(const Group& group, const Param& param) const {
    const char* name = kind_ == MuonKind::kDion ? "mu" : "momentum";
    const auto mu = real_setting(group, name);
    if (!mu || !(*mu >= 0.0 && *mu < 1.0))
      return bad(shown(param) +
                 ": its momentum is a sum of gradients, which is an average divided " + "by 1 - " +
                 name + ", and its group's " + name + " is " + (mu ? "not in [0, 1)" : "missing"));
    return *mu;
  }

  /// The settings of a group, or of its part that Muon or AdamW steps, as torch and lowbit name
  /// them.
  void settings(const Group& group, bool muon, Group& to) {
    Settings& out = to.settings;
    const auto take = [&](const char* from, const char* name) {
      if (const Value* said = setting(group, from)) set_in(out, name, *said);
    };
    take("lr", "lr");
    take("wd", "weight_decay");
    take("weight_decay", "weight_decay");
    take("mu", "momentum");
    take("momentum", "momentum");
    // Keller Jordan's does not say that it steps with Nesterov's momentum.
    if (muon) set_in(out, "nesterov", Value::boolean(true));
    take("nesterov", "nesterov");
    take("ns_steps", "ns_steps");
    set_in(out, "adjust_lr_fn", adjusted(group, muon));
    take("adamw_betas", "betas");
    take("betas", "betas");
    if (const Value *one = setting(group, "beta1"), *two = setting(group, "beta2");
        one != nullptr && two != nullptr)
      set_in(out, "betas", Value::tuple({*one, *two}));
    if (!muon) {
      take("adamw_eps", "eps");
      take("epsilon", "eps");
      take("eps", "eps");
      take("decoupled_weight_decay", "decoupled_weight_decay");
    }
    take("cautious_wd", "cautious_weight_decay");
    if (is_on(group, "flatten")) take("flatten", "flatten");
    set_in(out, "use_muon", Value::boolean(muon));
    take("initial_lr", "initial_lr");
    for (const auto& [name, value] : group.settings) {  // the user's own
      if (!is_setting(name) && !is_of_muon(name) && name != "param_names") set_in(out, name, value);
    }
    if (const Value* said = setting(group, "param_names")) {
      Value names = Value::list({});
      for (size_t i = 0; i < group.params.size() && i < said->items.size(); ++i) {
        if (by_muon_[group.params[i]] == muon) names.items.push_back(said->items[i]);
      }
      set_in(out, "param_names", std::move(names));
    }
  }

  /// lowbit's and torch's word for the factor of the learning rate.
  Value adjusted(const Group& group, bool muon) {
    if (kind_ == MuonKind::kMoonlight) return Value::words("match_rms_adamw");
    if (kind_ == MuonKind::kKeller) return Value::words("original");
    const Value* said = setting(group, "adjust_lr");
    if (said != nullptr && said->is(Value::Kind::kText) && said->text == "rms_norm")
      return Value::words("match_rms_adamw");
    adjusted_otherwise_ = adjusted_otherwise_ || muon;
    return Value::words("original");
  }

  void warn() {
    if (adjusted_otherwise_)
      out_.warnings.push_back(
          "Dion multiplies the learning rate by sqrt(rows / columns), also below 1, or by nothing: "
          "adjust_lr_fn becomes 'original', sqrt(max(1, rows / columns)); adjust lr where that "
          "differs");
    size_t matrices = 0, without = 0;
    for (size_t i = 0; i < out_.params.size(); ++i) {
      matrices += by_muon_[i];
      without += by_muon_[i] && out_.params[i].states.empty();
    }
    if (kind_ == MuonKind::kKeller && without > 0 && without < matrices)
      out_.warnings.push_back(
          std::to_string(without) + " of " + std::to_string(matrices) +
          " matrices have no momentum: over several ranks each keeps that of its own matrices, and "
          "this is the file of one rank");
  }

  const MuonKind kind_;
  const MuonNames& names_;
  const OptimizerTree& tree_;
  Model& out_;
  std::vector<bool> by_muon_;
  bool adjusted_otherwise_ = false;
};

}  // namespace

int recognize_muon(MuonKind kind, const OptimizerTree& tree) {
  if (is_ours(tree)) return 0;
  const Open open = left_open(tree);
  if (kind == MuonKind::kDion) return any_group(tree, "mu") && any_group(tree, "algorithm") ? 3 : 0;
  if (kind == MuonKind::kMoonlight) {
    if (any_group(tree, "wd") && any_group(tree, "adamw_betas")) return 3;
    return open == Open::kSumOrAverage ? 3 : 0;
  }
  if (open == Open::kSumOrAverage) return 3;
  if (open == Open::kAverageOrSgd) return 2;
  return any_group(tree, "use_muon") && !any_group(tree, "adamw_betas") ? 3 : 0;
}

Result<Model> read_muon(MuonKind kind, std::shared_ptr<const Document> document,
                        const OptimizerTree& tree) {
  Model out = model_of(tree, names_of(kind).dialect, document);
  RETURN_IF_ERROR(Reader(kind, tree, out).run());
  out.algorithm = algorithm_of(out);
  return out;
}

}  // namespace lowbit::ckpt
