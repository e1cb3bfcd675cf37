// The settings of a parameter group as lowbit's optimizers have them.
#include <algorithm>
#include <cmath>
#include <set>

#include "dialect/common/other_libraries.h"
#include "dialect/lowbit/lowbit.h"
#include "dialect/numbers/numbers.h"
#include "dialect/tree/algorithm.h"
#include "dialect/tree/optimizer_tree.h"
#include "policy/names.h"

namespace lowbit::ckpt {
namespace {

constexpr double kSubspaceEps = 1e-8;  // of lowbit.Adafactor where eps[0] is None

/// What adafactor-8bit's groups say under other names than lowbit.Adafactor's, or mean otherwise.
void translate_adafactor8bit(const Model& model, const Group& group, Settings& out) {
  if (setting(group, "scale_weight_decay") != nullptr)
    set_in(out, "decay_by", Value::words(is_on(group, "scale_weight_decay") ? "alpha" : "rho"));
  const bool low_rank = std::ranges::any_of(
      group.params, [&](size_t p) { return number_in(model.params[p], "apollo_rank") != nullptr; });
  // Its margin is always that of the subspace; elsewhere it counts where it is enabled.
  if (!low_rank && setting(group, "fira_margin") != nullptr &&
      !is_on(group, "enable_fira_for_adafactor"))
    set_in(out, "fira_margin", Value{});
  if (!low_rank) return;
  for (const char* key : {"rank", "update_proj_gap", "scale_type"}) {
    if (const Value* said = setting(group, std::string("apollo_") + key)) set_in(out, key, *said);
  }
  set_in(out, "projection", Value::words("torch"));
  // lowbit's subspace has eps[0]'s square under the root; the file's eps[0] is not of its subspace.
  const double floor = real_setting(group, "apollo_eps").value_or(kSubspaceEps);
  for (auto& [key, value] : out) {
    if (key == "eps" && value.items.size() == 2)
      value.items[0] = floor == kSubspaceEps ? Value::none() : Value::floating(std::sqrt(floor));
  }
}

/// The same of its groups with beta3, which lowbit.CAME steps with: what it calls eps there is that
/// of Adafactor, whose first alone counts (0.4.6: optimizer.py, presets.py).
void translate_came(const Group& group, Settings& out) {
  Value* betas = nullptr;
  for (auto& [key, value] : out) {
    const Value usual = value;
    if (key == "betas") betas = &value;
    if (key == "clip_threshold")
      value = Value::floating(real_setting(group, "d").value_or(usual.real));
    if (key != "eps" || usual.items.size() != 2) continue;
    const bool said = usual.items[0].is(Value::Kind::kFloat);
    value = Value::tuple({Value::floating(said ? usual.items[0].real : 1e-30),
                          Value::floating(real_setting(group, "eps_came").value_or(1e-16))});
  }
  constexpr const char* kNames[] = {"beta1", "beta2", "beta3"};
  for (size_t i = 0; betas != nullptr && i < std::min(betas->items.size(), std::size(kNames)); ++i)
    if (const auto said = real_setting(group, kNames[i])) betas->items[i] = Value::floating(*said);
}

}  // namespace

Result<Settings> lowbit_group(const Model& model, const Wanted& wanted, const Group& group,
                              const std::map<std::string, StateSpec>& used) {
  const bool keeps_formats = wanted.state_format.empty();
  const bool own = model.dialect == "lowbit";
  const auto kept = [&](const char* name, Value otherwise) {
    const Value* said = own ? setting(group, name) : nullptr;
    return said == nullptr ? otherwise : *said;
  };
  Value format = Value::words(keeps_formats ? "8bit" : wanted.state_format);
  if (own && keeps_formats && wanted.block == 0) {
    format = kept("state_format", format);
  } else if (keeps_formats || wanted.block != 0) {
    bool plain = wanted.block == 0;  // whether the preset says the same
    Value each{.kind = Value::Kind::kDict};
    for (const auto& [name, spec] : used) {
      ASSIGN_OR_RETURN(usual, spec_of("8bit", is_signed_state(name), 0));
      plain = plain && spec == usual;
      each.set(name, value_of(spec));
    }
    if (!plain && !used.empty()) format = std::move(each);
  }
  Value full_precision = Value::tuple({});
  for (const std::string& pattern : wanted.full_precision)
    full_precision.items.push_back(Value::words(pattern));
  if (wanted.full_precision.empty()) full_precision = kept("full_precision", full_precision);
  Settings out = settings_of(group, lowbit_settings(model.algorithm));
  if (model.dialect == "adafactor8bit" && model.algorithm == "adafactor")
    translate_adafactor8bit(model, group, out);
  if (model.dialect == "adafactor8bit" && model.algorithm == "came") translate_came(group, out);
  if (const Value* said = setting(group, "trust_coeff"); said && model.algorithm == "lars")
    set_in(out, "trust_coefficient", *said);  // of timm
  if (const Value* said = setting(group, "use_muon"); said && model.algorithm == "muon") {
    out.emplace_back("use_muon", *said);
    const Value* betas = setting(group, "betas");
    out.emplace_back("betas", betas != nullptr
                                  ? *betas
                                  : Value::tuple({Value::floating(0.9), Value::floating(0.95)}));
  }
  out.emplace_back("state_format", std::move(format));
  out.emplace_back("param_format", kept("param_format", Value::words("auto")));
  out.emplace_back("full_precision", std::move(full_precision));
  out.emplace_back("seed", kept("seed", Value::number(0)));
  out.emplace_back("lowbit_version", Value::number(1));
  for (const char* name : {"overrides", "min_numel"}) {
    if (own && setting(group, name) != nullptr) out.emplace_back(name, *setting(group, name));
  }
  // Options of APOLLO and Fira, whose states have Adam's names.
  std::set<std::string> made;
  for (const auto& [key, value] : out) made.insert(key);
  for (const auto& [key, value] : own ? settings_elsewhere(group) : Settings()) {
    if (made.insert(key).second) out.emplace_back(key, value);
  }
  // Parameters that are known by name have it here too, as where an optimizer was given names.
  const bool named =
      std::ranges::all_of(group.params, [&](size_t p) { return !model.params[p].name.empty(); });
  if (named && !model.flattened && setting(group, "param_names") == nullptr) {
    Value names = Value::list({});
    for (const size_t p : group.params)
      names.items.push_back(Value::words(clean_name(model.params[p].name)));
    out.emplace_back("param_names", std::move(names));
  }
  return out;
}

}  // namespace lowbit::ckpt
