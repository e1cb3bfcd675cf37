// An optimizer of Megatron-Core, laid out as torch's: one group for each optimizer.
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>

#include "dialect/megatron_view/megatron.h"
#include "dialect/megatron_view/megatron_groups.h"
#include "dialect/numbers/document_leaves.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr std::string_view kState = "optimizer.state.", kBuckets = "optimizer.distributed.",
                           kChained = "chained_";

bool is_common_item(const Leaf& leaf) { return leaf.name() == Document::kCommonItem; }

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
  if (std::ranges::find(kStates, state) == std::end(kStates)) return std::nullopt;
  return StateName{chain, std::string(state), std::string(rest.substr(dot + 1))};
}

bool is_bucket(const Leaf& leaf) {
  return leaf.path.size() == 1 && leaf.path[0].is_name() &&
         chain_of(leaf.path[0].name).second.starts_with(kBuckets);
}

/// A group as torch lays it out, and the steps of its parameters.
void add_group(DecidedGroup group, int64_t number, std::vector<Leaf>& leaves) {
  const Path path{"optimizer", "param_groups", Key(Key::Kind::kIndex, number)};
  const auto add = [&](const std::string& key, Value value) {
    Path at = path;
    at.emplace_back(key);
    leaves.push_back(value_leaf(std::move(at), std::move(value)));
  };
  Value list = Value::list({});
  for (const std::string& name : group.params) {
    list.items.push_back(Value::words(name));
    leaves.push_back(value_leaf({"optimizer", "state", name, "step"}, Value::floating(group.step)));
  }
  for (auto& [key, value] : group.settings) add(key, std::move(value));
  add("params", std::move(list));
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
/// states. Float32 ones may do without a master weight. Of several optimizers whose tensors have no
/// prefix (`chained`), parameters have the same moments or none in common, as of Muon and Adam.
class SameStates {
 public:
  explicit SameStates(bool chained) : chained_(chained) {}
  void add(const StateName& name, const std::string& state, const Leaf& weight) {
    auto [at, fresh] = params_.try_emplace(name.param, Of{name.chain, weight.dtype, {}});
    at->second.states.insert(state);
    if (fresh) order_.push_back(name.param);
  }
  Status check() const {
    std::map<std::tuple<std::string, std::set<std::string>, const Dtype*>, std::string> first;
    std::map<std::string, std::map<std::set<std::string>, std::string>> first_of_chain;
    for (const std::string& name : order_) {
      const Of& of = params_.at(name);
      const std::set<std::string> own = moments(of);
      auto& others = first_of_chain[of.chain];
      others.try_emplace(own, name);
      for (const auto& [moments, other] : others)
        if (moments != own && !(chained_ && apart(moments, own))) return differ(name, other);
      const auto& whole = first.try_emplace({of.chain, own, of.dtype}, name).first->second;
      if (params_.at(whole).states != of.states) return differ(name, whole);
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
  static bool apart(const std::set<std::string>& a, const std::set<std::string>& b) {
    return !a.empty() && !b.empty() &&
           std::ranges::none_of(a, [&](const std::string& s) { return b.contains(s); });
  }
  static Error differ(const std::string& name, const std::string& other) {
    return bad(printable(name) + ": has not the states that " + printable(other) +
               " has, so the checkpoint is not whole");
  }
  bool chained_;
  std::map<std::string, Of> params_;
  std::vector<std::string> order_;
};

}  // namespace

bool is_megatron(const Document& document) {
  if (document.manifest == nullptr || document.manifest->kind != ContainerKind::kDcp) return false;
  return std::ranges::any_of(document.leaves, [](const Leaf& leaf) {
    return is_bucket(leaf) || state_name(leaf).has_value();
  });
}

Status check_common_kept(const Document& document, const std::string& source, ContainerKind target,
                         std::vector<std::string>& warnings) {
  const bool inside =
      document.common != nullptr && !document.common->manifest->path.ends_with("/common.pt");
  const bool kept = inside && target == ContainerKind::kDcp &&
                    std::ranges::any_of(document.leaves, is_common_item);
  if (kept)
    warnings.emplace_back("metadata.json is left out; Megatron-Core loads no folder without it");
  if (is_megatron(document) && !kept)
    return bad(printable(source) +
               ": is a checkpoint of Megatron-Core, whose steps and settings are in " +
               (inside ? std::string(Document::kCommonItem) : "common.pt") +
               ", which what is written would lack; convert it --to torch or --to lowbit, or leave "
               "its optimizer out (--exclude)");
  if (document.common != nullptr && !inside) warnings.emplace_back("common.pt is left out");
  return fine();
}

void leave_common_behind(Document& document) {
  if (!is_megatron(document)) return;
  std::erase_if(document.leaves, is_common_item);
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
        "its optimizer is Megatron-Core's, whose steps and settings are in common.pt or in the "
        "item " +
        std::string(Document::kCommonItem) + ", and neither can be read");
  ASSIGN_OR_RETURN(settled, megatron_groups(*document.common));
  // Megatron-Core may leave the prefix "chained_N." out (chained_optim_avoid_prefix).
  const bool chained =
      !settled.empty() && !settled.contains("") &&
      std::ranges::all_of(states, [](const auto& state) { return state.first.chain.empty(); });
  if (chained) settled = chained_as_one(settled);
  std::map<std::string, std::vector<std::string>> params;  // of each optimizer, in order
  std::set<std::pair<std::string, std::string>> seen;
  std::set<std::string> names;
  SameStates same(chained);
  for (const auto& [name, leaf] : states) {
    const auto weight = weights.find(name.param);
    if (weight == weights.end())
      return bad(printable(leaf->name()) +
                 ": the checkpoint has no weight of that name, which tells its shape");
    if (!settled.contains(name.chain))
      return bad("the common state has no groups of the optimizer of " + printable(leaf->name()));
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
  RETURN_IF_ERROR(check_members(settled, params, document.members));
  int64_t group = 0;
  for (const auto& [chain, names_of_chain] : params) {
    ASSIGN_OR_RETURN(groups, decided_groups(settled.at(chain), names_of_chain, document.members,
                                            out.undecided, out.warnings));
    for (DecidedGroup& decided : groups)
      add_group(std::move(decided), group++, out.document.leaves);
  }
  out.document.manifest = document.manifest;
  return out;
}

}  // namespace lowbit::ckpt
