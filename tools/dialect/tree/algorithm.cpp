#include "dialect/tree/algorithm.h"

#include <algorithm>
#include <map>
#include <set>

#include "catalog/catalog.h"
#include "dialect/tree/optimizer_tree.h"
#include "dialect/tree/other_rules.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// Slots of all rules: name and whether it has negative values.
const std::map<std::string, bool>& moments() {
  static const std::map<std::string, bool> all = [] {
    std::map<std::string, bool> made;
    for (int r = 0; r < rule_count(); ++r) {
      const RuleInfo rule = rule_info(r);
      for (int k = 0; k < rule.slots; ++k) made[rule.slot[k].name] = rule.slot[k].is_signed;
    }
    return made;
  }();
  return all;
}

Value flag(bool b) { return Value::boolean(b); }
Value real(double x) { return Value::floating(x); }
Value pair(double a, double b) { return Value::tuple({real(a), real(b)}); }
Value triple(double a, double b, double c) { return Value::tuple({real(a), real(b), real(c)}); }
Value zero() { return Value::number(0); }
Value none() { return Value::none(); }

const std::map<std::string, Settings>& torch_tables() {
  static const std::map<std::string, Settings> all = {
      {"adam",
       {{"lr", real(1e-3)},
        {"betas", pair(0.9, 0.999)},
        {"eps", real(1e-8)},
        {"weight_decay", zero()},
        {"amsgrad", flag(false)},
        {"maximize", flag(false)},
        {"foreach", none()},
        {"capturable", flag(false)},
        {"differentiable", flag(false)},
        {"fused", none()},
        {"decoupled_weight_decay", flag(true)}}},
      {"sgd",
       {{"lr", real(1e-3)},
        {"momentum", zero()},
        {"dampening", zero()},
        {"weight_decay", zero()},
        {"nesterov", flag(false)},
        {"maximize", flag(false)},
        {"foreach", none()},
        {"differentiable", flag(false)},
        {"fused", none()}}},
      {"adafactor",
       {{"lr", real(1e-2)},
        {"beta2_decay", real(-0.8)},
        {"eps", Value::tuple({none(), real(1e-3)})},
        {"d", real(1.0)},
        {"weight_decay", real(0.0)},
        {"foreach", none()},
        {"maximize", flag(false)}}},
      {"rmsprop",
       {{"lr", real(1e-2)},
        {"momentum", zero()},
        {"alpha", real(0.99)},
        {"eps", real(1e-8)},
        {"centered", flag(false)},
        {"weight_decay", zero()},
        {"capturable", flag(false)},
        {"foreach", none()},
        {"maximize", flag(false)},
        {"differentiable", flag(false)}}},
      {"adagrad",
       {{"lr", real(1e-2)},
        {"lr_decay", zero()},
        {"eps", real(1e-10)},
        {"weight_decay", zero()},
        {"initial_accumulator_value", zero()},
        {"foreach", none()},
        {"maximize", flag(false)},
        {"differentiable", flag(false)},
        {"fused", none()}}},
      {"muon",
       {{"lr", real(1e-3)},
        {"weight_decay", real(0.1)},
        {"momentum", real(0.95)},
        {"nesterov", flag(true)},
        {"ns_coefficients", triple(3.4445, -4.7750, 2.0315)},
        {"eps", real(1e-7)},
        {"ns_steps", Value::number(5)},
        {"adjust_lr_fn", none()}}},
  };
  return all;
}

/// Every lowbit group has these; what follows them is the algorithm's own.
Settings with_shared(double lr, const Settings& own) {
  Settings all = {{"lr", real(lr)},
                  {"maximize", flag(false)},
                  {"foreach", none()},
                  {"capturable", flag(false)},
                  {"differentiable", flag(false)},
                  {"fused", none()}};
  all.insert(all.end(), own.begin(), own.end());
  return all;
}

const std::map<std::string, Settings>& lowbit_tables() {
  static const std::map<std::string, Settings> all = {
      {"adam", with_shared(1e-3, {{"betas", pair(0.9, 0.999)},
                                  {"eps", real(1e-8)},
                                  {"weight_decay", zero()},
                                  {"amsgrad", flag(false)},
                                  {"decoupled_weight_decay", flag(true)},
                                  {"cautious", flag(false)}})},
      {"sgd", with_shared(1e-3, {{"momentum", zero()},
                                 {"dampening", zero()},
                                 {"weight_decay", zero()},
                                 {"nesterov", flag(false)},
                                 {"decoupled", flag(false)},
                                 {"dampen_first", flag(false)},
                                 {"cautious", flag(false)}})},
      {"adafactor", with_shared(1e-2, {{"beta2_decay", real(-0.8)},
                                       {"eps", Value::tuple({none(), real(1e-3)})},
                                       {"d", real(1.0)},
                                       {"weight_decay", real(0.0)},
                                       {"beta1", none()},
                                       {"beta2", none()},
                                       {"relative_step", flag(true)},
                                       {"scale_parameter", flag(true)},
                                       {"decay_by", Value::words("lr")},
                                       {"fira_margin", none()},
                                       {"factored", flag(true)},
                                       {"add_eps", flag(false)},
                                       {"rank", none()},
                                       {"update_proj_gap", Value::number(200)},
                                       {"scale_type", Value::words("channel")},
                                       {"projection", Value::words("philox")}})},
      {"rmsprop", with_shared(1e-2, {{"alpha", real(0.99)},
                                     {"eps", real(1e-8)},
                                     {"weight_decay", zero()},
                                     {"momentum", zero()},
                                     {"centered", flag(false)}})},
      {"adagrad", with_shared(1e-2, {{"lr_decay", zero()},
                                     {"eps", real(1e-10)},
                                     {"weight_decay", zero()},
                                     {"initial_accumulator_value", zero()}})},
      {"lion", with_shared(1e-4, {{"betas", pair(0.9, 0.99)},
                                  {"weight_decay", real(0.0)},
                                  {"cautious", flag(false)}})},
      {"ademamix", with_shared(1e-3, {{"betas", triple(0.9, 0.999, 0.9999)},
                                      {"alpha", real(5.0)},
                                      {"t_alpha", none()},
                                      {"t_beta3", none()},
                                      {"eps", real(1e-8)},
                                      {"weight_decay", real(0.01)}})},
      {"lamb",
       with_shared(
           1e-3, {{"betas", pair(0.9, 0.999)}, {"eps", real(1e-8)}, {"weight_decay", real(0.0)}})},
      {"lars", with_shared(1e-3, {{"momentum", real(0.9)},
                                  {"dampening", real(0.0)},
                                  {"weight_decay", real(0.0)},
                                  {"nesterov", flag(false)},
                                  {"trust_coefficient", real(0.001)},
                                  {"eps", real(1e-8)}})},
      {"came", with_shared(2e-4, {{"eps", pair(1e-30, 1e-16)},
                                  {"clip_threshold", real(1.0)},
                                  {"betas", triple(0.9, 0.999, 0.9999)},
                                  {"weight_decay", real(0.0)}})},
      {"schedule_free", with_shared(2.5e-3, {{"betas", pair(0.9, 0.999)},
                                             {"eps", real(1e-8)},
                                             {"weight_decay", zero()},
                                             {"warmup_steps", zero()},
                                             {"r", real(0.0)},
                                             {"weight_lr_power", real(2.0)},
                                             {"k", zero()},
                                             {"train_mode", flag(false)},
                                             {"weight_sum", real(0.0)},
                                             {"lr_max", real(-1.0)},
                                             {"scheduled_lr", real(0.0)}})},
      {"muon", with_shared(1e-3, {{"weight_decay", real(0.1)},
                                  {"momentum", real(0.95)},
                                  {"nesterov", flag(true)},
                                  {"ns_coefficients", triple(3.4445, -4.7750, 2.0315)},
                                  {"eps", real(1e-7)},
                                  {"ns_steps", Value::number(5)},
                                  {"adjust_lr_fn", none()},
                                  {"orthogonalize", Value::words("auto")},
                                  {"split", none()},
                                  {"normuon_beta2", none()},
                                  {"cautious_weight_decay", flag(false)}})},
  };
  return all;
}

/// Settings in which a library says how it keeps state. They mean nothing to another library.
const std::set<std::string>& keeping_settings() {
  static const std::set<std::string> all = {
      // lowbit
      "state_format", "param_format", "full_precision", "seed", "overrides", "min_numel",
      "lowbit_version",
      // bitsandbytes, torchao, FlashOptim, lpmm, adafactor-8bit
      "block_size", "bf16_stochastic_round", "optim_bits", "percentile_clipping", "block_wise",
      "max_unorm", "skip_zeros", "min_8bit_size", "is_paged", "quantize", "compress_state_dict",
      "master_weight_bits", "master_bytewidth", "check_numerics", "qconfig", "q_bits"};
  return all;
}

/// Settings of some optimizer library: not the user's.
const std::set<std::string>& library_settings() {
  static const std::set<std::string> all = [] {
    std::set<std::string> made = keeping_settings();
    made.insert({"rank", "update_proj_gap", "scale", "scale_type", "proj_type", "decouple_lr",
                 "adam_w_mode", "use_first_moment", "factor_second_moment", "clip_threshold",
                 "decay_rate", "scale_parameter", "relative_step", "warmup_init", "beta1",
                 "bias_correction", "use_muon"});
    made.insert({"trust_coeff", "trust_clip", "always_adapt"});  // timm
    for (const auto* tables : {&torch_tables(), &lowbit_tables()}) {
      for (const auto& [name, table] : *tables) {
        for (const auto& [key, value] : table) made.insert(key);
      }
    }
    return made;
  }();
  return all;
}

/// The states of all update rules of which a flag is set.
std::set<std::string> states_with(bool lowbit::Slot::* flag) {
  std::set<std::string> made;
  for (int r = 0; r < rule_count(); ++r) {
    const RuleInfo rule = rule_info(r);
    for (int k = 0; k < rule.slots; ++k) {
      if (rule.slot[k].*flag) made.insert(rule.slot[k].name);
    }
  }
  return made;
}

/// Whether all groups are of timm's LARS where its step is that of lowbit's: it adapts a tensor
/// that is not decayed only with `always_adapt`.
bool takes_step_of_lars(const std::vector<Group>& groups) {
  return !groups.empty() && std::ranges::all_of(groups, [&](const Group& group) {
    return setting(group, "trust_coeff") != nullptr && !is_on(group, "trust_clip") &&
           (is_on(group, "weight_decay") || is_on(group, "always_adapt"));
  });
}

/// The algorithm by the names of its states, before a look at the settings by which others are
/// known that have the same names.
std::string algorithm_by_states(const Model& model) {
  std::set<std::string> names;
  for (const Param& p : model.params) {
    for (const State& s : p.states) {
      if (s.name.starts_with("param_")) continue;  // kept beside the weight, whatever steps it
      if (s.name == "projection" && model.dialect == "lowbit") continue;  // of Fira, an Adam
      std::string name = s.name;
      for (const char* end : {"_row", "_col"}) {
        if (name.ends_with(end)) name = name.substr(0, name.size() - 4);
      }
      names.insert(name);
    }
  }
  const auto set = [&](const char* name) {
    return !model.groups.empty() && setting(model.groups[0], name) != nullptr;
  };
  const auto only = [&](std::set<std::string> allowed, const std::string& needed) {
    return names.contains(needed) && std::ranges::includes(allowed, names);
  };
  // AdamW steps what Muon does not.
  const bool muon = std::ranges::any_of(model.groups, [](const Group& group) {
    return setting(group, "ns_coefficients") != nullptr || setting(group, "use_muon") != nullptr;
  });
  const std::set<std::string> of_muon = {"momentum_buffer", kRowMoments, "exp_avg", "exp_avg_sq"};
  if (muon) {
    return std::ranges::includes(of_muon, names) ? "muon" : "";
  }
  if (names.empty()) return set("momentum") && (set("nesterov") || set("dampening")) ? "sgd" : "";
  if (only({"exp_avg", "exp_avg_slow", "exp_avg_sq"}, "exp_avg_slow")) return "ademamix";
  if (only({"exp_avg", "exp_avg_sq", "exp_avg_res"}, "exp_avg_res")) return "came";
  if (only({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, "exp_avg_sq")) {
    // The Adafactor of transformers and fairseq need not have a first moment.
    if (!names.contains("exp_avg")) return "";
    if (set("clip_threshold")) return model.dialect == "lowbit" ? "came" : "";  // of vectors alone
    // lowbit.LAMB has no option of lowbit.Adam's, nor APOLLO's rank or AdEMAMix's t_beta3.
    const bool lamb = model.dialect == "lowbit" && set("betas") && !set("amsgrad") &&
                      !set("rank") && !set("t_beta3");
    return lamb ? "lamb" : "adam";
  }
  if (only({"z", "exp_avg_sq"}, "z")) return "schedule_free";
  if (only({"exp_avg", "variance"}, "variance")) return "adafactor";
  if (only({"exp_avg"}, "exp_avg")) return "lion";
  if (only({"square_avg", "momentum_buffer", "grad_avg"}, "square_avg")) return "rmsprop";
  if (only({"sum"}, "sum")) return "adagrad";
  if (only({"momentum_buffer"}, "momentum_buffer"))
    return set("trust_coefficient") || takes_step_of_lars(model.groups) ? "lars" : "sgd";
  return "";
}

}  // namespace

bool is_setting(const std::string& name) { return library_settings().contains(name); }

bool is_moment(const std::string& name) { return moments().contains(name); }

bool is_weight_state(const std::string& name) {
  static const std::set<std::string> all = states_with(&lowbit::Slot::is_weight);
  return all.contains(name);
}

bool is_slow_state(const std::string& name) {
  static const std::set<std::string> all = states_with(&lowbit::Slot::is_slow);
  return all.contains(name);
}

bool is_signed_state(const std::string& name) {
  const auto known = moments().find(name);
  if (known != moments().end()) return known->second;
  return !name.ends_with("_row") && !name.ends_with("_col");  // means of squares
}

std::string algorithm_of(const Model& model) {
  const std::string by_states = algorithm_by_states(model);
  return other_rule(by_states, model).empty() ? by_states : "";
}

std::string other_rule_of(const Model& model) {
  return other_rule(algorithm_by_states(model), model);
}

std::string refusal_of_rule(const Model& model, const std::string& whose) {
  const std::string other = other_rule_of(model);
  if (other.empty()) return "";
  return "its optimizer is " + other + ", whose states are named like another's; " + whose +
         " has no optimizer that takes its step: continue with that optimizer, or start a new one "
         "from the weights";
}

Status refuse_subspace(const Model& model, const std::string& whose) {
  for (const Param& p : model.params) {
    if (setting(p.numbers, "apollo_rank") == nullptr) continue;
    const bool fira =
        std::ranges::any_of(p.states, [](const State& s) { return s.name == "projection"; });
    const char* by = fira                             ? "Fira"
                     : model.algorithm == "adafactor" ? "Adafactor with a rank"
                                                      : "APOLLO";
    return bad(shown(p) + ": its state is of the gradient in a subspace, which " + whose +
               " does not have; only lowbit's " + by + " continues with it" +
               (model.dialect == "lowbit" ? "" : " (convert --to lowbit)"));
  }
  return fine();
}

Error no_optimizer(const Model& model, const std::string& whose) {
  if (model.algorithm == "lamb")
    return bad(
        whose +
        " has no optimizer that takes the step of lowbit.LAMB, whose states have the names of "
        "Adam's");
  if (model.algorithm == "lars")
    return bad(whose +
               " has no optimizer that takes the step of LARS, whose states have the names of "
               "SGD's");
  std::vector<std::string> names;  // LBFGS has hundreds
  for (const Param& p : model.params) {
    if (p.states.empty()) continue;
    for (const State& s : p.states) names.push_back(s.name);
    for (const auto& [name, value] : p.numbers) {
      if (name != "step") names.push_back(name);
    }
    break;
  }
  return bad(whose + " has no optimizer that keeps these states" +
             (names.empty() ? "" : " (" + some_of(names) + ")"));
}

bool torch_lacks_optimizer(const Model& model) {
  // torch's Muon steps matrices only, and is not a NorMuon.
  const bool mixed =
      model.algorithm == "muon" && std::ranges::any_of(model.params, [](const Param& p) {
        return std::ranges::any_of(p.states,
                                   [](const State& s) { return s.name != "momentum_buffer"; });
      });
  return mixed || torch_settings(model.algorithm).empty();
}

const Settings& torch_settings(std::string_view algorithm) {
  static const Settings nothing;
  const auto table = torch_tables().find(std::string(algorithm));
  return table == torch_tables().end() ? nothing : table->second;
}

const Settings& lowbit_settings(std::string_view algorithm) {
  static const Settings nothing;
  const auto table = lowbit_tables().find(std::string(algorithm));
  return table == lowbit_tables().end() ? nothing : table->second;
}

std::vector<std::string> settings_without_value(const std::string& algorithm, const Group& group) {
  std::vector<std::string> out;
  for (const auto& [key, value] : lowbit_settings(algorithm)) {
    const Value* said = setting(group, key);
    const bool optional = value.is(Value::Kind::kNone) || value.is(Value::Kind::kBool);
    if (!optional && said != nullptr && said->is(Value::Kind::kNone)) out.push_back(key);
  }
  return out;
}

Settings settings_elsewhere(const Group& group) {
  Settings out = group.settings;
  std::erase_if(out, [](const auto& s) { return keeping_settings().contains(s.first); });
  return out;
}

Settings settings_of(const Group& group, const Settings& table) {
  Settings out;
  for (const auto& [key, value] : table) {
    const Value* said = setting(group, key);
    out.emplace_back(key, said == nullptr ? value : *said);
  }
  for (const auto& [key, value] : group.settings) {
    if (!library_settings().contains(key)) out.emplace_back(key, value);
  }
  return out;
}

}  // namespace lowbit::ckpt
