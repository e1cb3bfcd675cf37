// An optimizer of Megatron-Core, laid out as torch's: one group for each optimizer.
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>

#include "dialect/common/document_leaves.h"
#include "dialect/common/megatron.h"
#include "dialect/common/numbers.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr std::string_view kState = "optimizer.state.", kBuckets = "optimizer.distributed.",
                           kChained = "chained_";

/// What Megatron keeps in a group for itself.
constexpr std::string_view kOwnSettings[] = {"params",          "step",        "is_expert_parallel",
                                             "default_config",  "wd_mult",     "lr_mult",
                                             "is_decoupled_lr", "max_lr",      "min_lr",
                                             "pre_wd_mult",     "pre_lr_mult", "start_wd",
                                             "end_wd"};

/// The name of a state's tensor, taken apart.
struct StateName {
  std::string chain, state, param;
};

/// The number behind "chained_" that a name begins with, and what follows its dot.
std::pair<std::string, std::string_view> chain_of(std::string_view name) {
  if (!name.starts_with(kChained)) return {"", name};
  const size_t dot = name.find('.');
  const std::string_view number = name.substr(kChained.size(), dot - kChained.size());
  if (dot == std::string_view::npos || number.empty() ||
      number.find_first_not_of("0123456789") != std::string_view::npos)
    return {"", name};
  return {std::string(number), name.substr(dot + 1)};
}

std::optional<StateName> state_name(const Leaf& leaf) {
  if (leaf.kind != Leaf::Kind::kTensor || leaf.path.size() != 1 || !leaf.path[0].is_name())
    return std::nullopt;
  auto [chain, rest] = chain_of(leaf.path[0].name);
  if (!rest.starts_with(kState)) return std::nullopt;
  rest.remove_prefix(kState.size());
  const size_t dot = rest.find('.');
  if (dot == std::string_view::npos || dot + 1 == rest.size()) return std::nullopt;
  const std::string_view state = rest.substr(0, dot);
  static constexpr std::string_view kStates[] = {"exp_avg", "exp_avg_sq", "momentum_buffer",
                                                 "fp32_param", "param"};
  if (std::find(std::begin(kStates), std::end(kStates), state) == std::end(kStates))
    return std::nullopt;
  return StateName{chain, std::string(state), std::string(rest.substr(dot + 1))};
}

bool is_bucket(const Leaf& leaf) {
  return leaf.path.size() == 1 && leaf.path[0].is_name() &&
         chain_of(leaf.path[0].name).second.starts_with(kBuckets);
}

/// What common.pt says of one optimizer: each setting with its value in each group, and steps.
struct Settled {
  std::map<std::string, std::vector<Value>> settings;
  std::vector<std::string> order;
  std::vector<double> steps;
  std::set<std::string> groups;
};

/// By the optimizer's number; "" where there is one.
Result<std::map<std::string, Settled>> settled_of(const Document& common) {
  std::map<std::string, Settled> out;
  for (const Leaf& leaf : common.leaves) {
    const Path& path = leaf.path;
    if (path.size() < 3 || path[0].text() != "optimizer") continue;
    const auto groups = std::find_if(path.begin(), path.end(),
                                     [](const Key& k) { return k.text() == "param_groups"; });
    const bool common_step = path.back().text() == "common_step";
    if (!common_step && path.end() - groups < 3) continue;
    const std::string first = path[1].text();
    const bool chained = first.find_first_not_of("0123456789") == std::string::npos;
    Settled& at = out[chained ? first : ""];
    if (leaf.kind == Leaf::Kind::kOpaque || leaf.kind == Leaf::Kind::kSubclass ||
        (leaf.kind == Leaf::Kind::kTensor && volume(leaf.shape) != 1))
      continue;
    ASSIGN_OR_RETURN(value, number_of(leaf));
    const std::string key = common_step ? "step" : flat_name(Path(groups + 2, path.end()));
    if (key == "step") {
      ASSIGN_OR_RETURN(step, real_of(value, "common.pt: " + printable(leaf.name())));
      at.steps.push_back(step);
    }
    if (common_step) continue;
    at.groups.insert((groups + 1)->text());
    auto& values = at.settings[key];
    if (values.empty()) at.order.push_back(key);
    values.push_back(std::move(value));
  }
  return out;
}

/// The step that all groups of an optimizer agree on.
Result<double> step_of(const Settled& settled) {
  if (settled.steps.empty())
    return bad("common.pt does not say how many steps the optimizer has made");
  for (const double step : settled.steps) {
    if (step != settled.steps[0])
      return bad(
          "the groups have made different numbers of steps, and Megatron-Core does not save "
          "whose parameters are in which group");
  }
  return settled.steps[0];
}

std::string shown(const Value& v) {
  if (v.is(Value::Kind::kInt) || v.is(Value::Kind::kBool)) return std::to_string(v.integer);
  if (!v.is(Value::Kind::kFloat)) return "another value";
  std::string text = std::to_string(v.real);
  text.erase(text.find_last_not_of('0') + 1);
  return text.ends_with('.') ? text + '0' : text;
}

/// Adds the settings that all groups of one optimizer agree on, and names the others.
void add_settings(const Settled& settled, int64_t group, std::vector<Leaf>& leaves,
                  std::string& undecided) {
  for (const std::string& key : settled.order) {
    if (std::find(std::begin(kOwnSettings), std::end(kOwnSettings), key) != std::end(kOwnSettings))
      continue;
    const std::vector<Value>& values = settled.settings.at(key);
    const bool agreed =
        values.size() == settled.groups.size() &&
        std::all_of(values.begin(), values.end(), [&](const Value& v) { return v == values[0]; });
    if (agreed) {
      Path path{"optimizer", "param_groups", Key(Key::Kind::kIndex, group)};
      path.emplace_back(key);
      leaves.push_back(value_leaf(std::move(path), values[0]));
      continue;
    }
    undecided += (undecided.empty() ? "" : "; ") + printable(key);
    if (values.size() != settled.groups.size()) {
      undecided += " is not in all groups";
      continue;
    }
    std::string all;
    for (const Value& value : values) all += (all.empty() ? "" : ", ") + shown(value);
    undecided += " differs between the groups (" + all + ")";
  }
}

Error buckets(const Leaf& leaf) {
  return bad(
      "its optimizer is saved in flat buckets of the distributed optimizer (" +
      printable(leaf.name()) +
      "), and where a parameter lies in them is not saved. Resume it with Megatron, at the "
      "same tensor, pipeline and expert parallel sizes, with "
      "--dist-ckpt-optim-fully-reshardable (in Python: metadata={"
      "'distrib_optim_sharding_type': 'fully_reshardable'}), let it save once, and give that "
      "folder. The weights alone convert with --exclude '*optimizer.*'");
}

/// A copy or a save that broke off lacks tensors: the parameters of one optimizer have the same
/// states. Float32 ones may do without a master weight.
class SameStates {
 public:
  void add(const StateName& name, const std::string& state, const Leaf& weight) {
    auto [at, fresh] = params_.try_emplace(name.param, Of{name.chain, weight.dtype, {}});
    at->second.states.insert(state);
    if (fresh) order_.push_back(name.param);
  }
  Status check() const {
    std::map<std::pair<std::string, const Dtype*>, const std::string*> first;
    std::map<std::string, const std::string*> first_of_chain;
    for (const std::string& name : order_) {
      const Of& of = params_.at(name);
      const auto& whole = *first.try_emplace({of.chain, of.dtype}, &name).first->second;
      if (params_.at(whole).states != of.states) return differ(name, whole);
      const auto& other = *first_of_chain.try_emplace(of.chain, &name).first->second;
      if (moments(params_.at(other)) != moments(of)) return differ(name, other);
    }
    return fine();
  }

 private:
  struct Of {
    std::string chain;
    const Dtype* dtype;  // of the weight
    std::set<std::string> states;
  };
  static std::set<std::string> moments(const Of& of) {
    std::set<std::string> out = of.states;
    out.erase("master_param");
    return out;
  }
  static Error differ(const std::string& name, const std::string& other) {
    return bad(printable(name) + ": has not the states that " + printable(other) +
               " has, so the checkpoint is not whole");
  }
  std::map<std::string, Of> params_;
  std::vector<std::string> order_;
};

}  // namespace

bool is_megatron(const Document& document) {
  if (document.manifest == nullptr || document.manifest->kind != ContainerKind::kDcp) return false;
  return std::any_of(document.leaves.begin(), document.leaves.end(), [](const Leaf& leaf) {
    return is_bucket(leaf) || state_name(leaf).has_value();
  });
}

Status check_common_kept(const Document& document, const std::string& source,
                         std::vector<std::string>& warnings) {
  if (is_megatron(document))
    return bad(printable(source) +
               ": is a checkpoint of Megatron-Core, whose steps and settings are in common.pt, "
               "which what is written would lack; convert it --to torch or --to lowbit, or leave "
               "its optimizer out (--exclude)");
  if (document.common != nullptr) warnings.emplace_back("common.pt is left out");
  return fine();
}

Result<MegatronView> megatron_view(const Document& document) {
  MegatronView out;
  std::unordered_map<std::string, const Leaf*> weights;
  std::vector<std::pair<StateName, const Leaf*>> states;
  for (const Leaf& leaf : document.leaves) {
    if (is_bucket(leaf)) return buckets(leaf);
    if (auto name = state_name(leaf)) {
      states.emplace_back(std::move(*name), &leaf);
      continue;
    }
    out.rest.push_back(&leaf);
    if (leaf.kind == Leaf::Kind::kTensor) weights.emplace(leaf.name(), &leaf);
  }
  if (document.common == nullptr)
    return bad(
        "its optimizer is Megatron-Core's, whose steps and settings are in common.pt, which "
        "is not there");
  ASSIGN_OR_RETURN(settled, settled_of(*document.common));
  std::map<std::string, std::vector<std::string>> params;  // of each optimizer, in order
  std::set<std::pair<std::string, std::string>> seen;
  std::set<std::string> names;
  SameStates same;
  for (const auto& [name, leaf] : states) {
    const auto weight = weights.find(name.param);
    if (weight == weights.end())
      return bad(printable(leaf->name()) +
                 ": the checkpoint has no weight of that name, which tells its shape");
    if (!settled.contains(name.chain))
      return bad("common.pt has no groups of the optimizer of " + printable(leaf->name()));
    const bool master = name.state == "fp32_param" || name.state == "param";
    const std::string state = master ? "master_param" : name.state;
    if (!seen.emplace(name.param, state).second)
      return bad(printable(leaf->name()) + ": is there twice, in two optimizers");
    same.add(name, state, *weight->second);
    if (names.insert(name.param).second) params[name.chain].push_back(name.param);
    Leaf made = *leaf;
    made.path = {"optimizer", "state", name.param, state};
    if (leaf->shape != weight->second->shape) {
      ASSIGN_OR_RETURN(source, unflattened(*leaf, weight->second->shape));
      made.source = std::move(source);
      made.shape = weight->second->shape;
      made.stored = nullptr;
    }
    out.document.leaves.push_back(std::move(made));
  }
  RETURN_IF_ERROR(same.check());
  int64_t group = 0;
  for (const auto& [chain, names_of_chain] : params) {
    const Settled& settings = settled.at(chain);
    ASSIGN_OR_RETURN(step, step_of(settings));
    Value list = Value::list({});
    for (const std::string& name : names_of_chain) {
      list.items.push_back(Value::words(name));
      Value count{.kind = Value::Kind::kFloat};
      count.real = step;
      out.document.leaves.push_back(
          value_leaf({"optimizer", "state", name, "step"}, std::move(count)));
    }
    add_settings(settings, group, out.document.leaves, out.undecided);
    out.document.leaves.push_back(value_leaf(
        {"optimizer", "param_groups", Key(Key::Kind::kIndex, group++), "params"}, std::move(list)));
  }
  out.document.manifest = document.manifest;
  return out;
}

}  // namespace lowbit::ckpt
