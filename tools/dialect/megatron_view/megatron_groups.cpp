#include "dialect/megatron_view/megatron_groups.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "dialect/model/parameter_names.h"
#include "dialect/numbers/numbers.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// What Megatron's scheduler and loader alone use: lr and weight_decay have their effect.
constexpr std::string_view kOwnSettings[] = {
    "is_expert_parallel", "default_config", "wd_mult", "lr_mult",
    "is_decoupled_lr",    "max_lr",         "min_lr",  "pre_wd_mult",
    "pre_lr_mult",        "start_wd",       "end_wd"};

bool is_own(std::string_view name) {
  return std::ranges::find(kOwnSettings, name) != std::end(kOwnSettings);
}

/// "1=*.bias" taken apart.
struct Member {
  int64_t group;
  std::string pattern;
};
std::optional<Member> member_of(const std::string& said) {
  const size_t at = said.find('=');
  Member out{0, at == std::string::npos ? "" : said.substr(at + 1)};
  const auto [end, error] =
      std::from_chars(said.data(), said.data() + std::min(at, said.size()), out.group);
  if (at == std::string::npos || error != std::errc() || end != said.data() + at ||
      out.pattern.empty() || out.group < 0)
    return std::nullopt;
  return out;
}

std::string numbers_of(const std::vector<MegatronGroup>& groups) {
  std::string out;
  for (const MegatronGroup& group : groups)
    out += (out.empty() ? "" : ", ") + std::to_string(group.number);
  return out;
}

/// One group for all, with the settings on which all agree.
Result<DecidedGroup> agreed(const std::vector<MegatronGroup>& groups, std::string& undecided,
                            std::vector<std::string>& warnings) {
  DecidedGroup out;
  const MegatronGroup* stepped = nullptr;
  for (const MegatronGroup& group : groups) {
    if (!group.step) continue;
    if (stepped != nullptr && *stepped->step != *group.step)
      return bad(
          "the groups have made different numbers of steps, and Megatron-Core does not save "
          "whose parameters are in which group; --group N=PATTERN says it (groups " +
          numbers_of(groups) + ")");
    stepped = &group;
  }
  if (stepped == nullptr)
    return bad("the common state does not say how many steps the optimizer has made");
  out.step = *stepped->step;
  std::set<std::string> seen;
  std::string real, own;
  for (const MegatronGroup& first : groups) {
    for (const auto& [key, value] : first.settings) {
      if (!seen.insert(key).second) continue;
      std::string all;
      bool everywhere = true, same = true;
      for (const MegatronGroup& group : groups) {
        const Value* here = setting(group.settings, key);
        everywhere = everywhere && here != nullptr;
        same = same && here != nullptr && *here == value;
        all += (all.empty() ? "" : ", ") + (here == nullptr ? "none" : value_text(*here));
      }
      if (same) {
        out.settings.emplace_back(key, value);
        continue;
      }
      std::string& into = is_own(key) ? own : real;
      into += (into.empty() ? "" : "; ") + printable(key) +
              (everywhere ? " differs between the groups (" + all + ")" : " is not in all groups");
    }
  }
  if (!real.empty())
    undecided += (undecided.empty() ? "" : "; ") + real +
                 ", and Megatron-Core does not save whose parameters are in which of groups " +
                 numbers_of(groups) + ": --group N=PATTERN says it, such as --group '1=*.bias'";
  if (!own.empty())
    warnings.push_back(own + ", and whose parameters are in which of groups " + numbers_of(groups) +
                       " is not saved: left out; Megatron alone uses it");
  return out;
}

/// Where chains or the keys of an optimizer begin in the paths below "optimizer".
size_t begin_of(const Document& common) {
  const auto listed = [](const Leaf& leaf) {
    return leaf.path.size() < 2 || leaf.path[0].text() != "optimizer" || leaf.path[1] == place(0);
  };
  return std::ranges::all_of(common.leaves, listed) ? 2 : 1;
}

Error two_counts(double one, double other) {
  return bad("the common state counts " + value_text(Value::floating(one)) +
             " steps of an optimizer, and " + value_text(Value::floating(other)) +
             " as its common_step: which of them holds?");
}

/// Gives the groups that count no steps those of the others, where these agree.
void take_steps(Groups& groups) {
  std::set<double> steps;
  for (const auto& [chain, of_chain] : groups)
    for (const MegatronGroup& group : of_chain)
      if (group.step) steps.insert(*group.step);
  if (steps.size() != 1) return;
  for (auto& [chain, of_chain] : groups)
    for (MegatronGroup& group : of_chain) group.step = *steps.begin();
}

}  // namespace

Result<Groups> megatron_groups(const Document& common) {
  Groups out;
  std::map<std::string, double> common_steps;
  std::map<std::pair<std::string, std::string>, size_t> places;
  int64_t number = 0;
  const size_t begin = begin_of(common);
  for (const Leaf& leaf : common.leaves) {
    const Path& path = leaf.path;
    if (path.size() < begin + 2 || path[0].text() != "optimizer") continue;
    const auto list =
        std::ranges::find_if(path, [](const Key& k) { return k.text() == "param_groups"; });
    const bool common_step = path.back().text() == "common_step";
    if (!common_step && path.end() - list < 3) continue;
    const std::string first = path[begin].text();
    const bool chained = first.find_first_not_of("0123456789") == std::string::npos;
    const std::string chain = chained ? first : "";
    auto& groups = out[chain];
    if (leaf.kind == Leaf::Kind::kOpaque || leaf.kind == Leaf::Kind::kSubclass ||
        (leaf.kind == Leaf::Kind::kTensor && volume(leaf.shape) != 1))
      continue;
    ASSIGN_OR_RETURN(value, number_of(leaf));
    if (common_step) {
      ASSIGN_OR_RETURN(step, real_of(value, "common state: " + printable(leaf.name())));
      if (!common_steps.try_emplace(chain, step).second && common_steps[chain] != step)
        return two_counts(common_steps[chain], step);
      continue;
    }
    const auto [place, fresh] = places.try_emplace({chain, (list + 1)->text()}, groups.size());
    if (fresh) groups.push_back({number++, {}});
    MegatronGroup& group = groups[place->second];
    const std::string key = flat_name(Path(list + 2, path.end()));
    if (key == "params") continue;
    if (key != "step") {
      group.settings.emplace_back(key, std::move(value));
      continue;
    }
    ASSIGN_OR_RETURN(step, real_of(value, "common state: " + printable(leaf.name())));
    group.step = step;
  }
  for (const auto& [chain, step] : common_steps) {
    for (MegatronGroup& group : out[chain]) {
      if (group.step && *group.step != step) return two_counts(*group.step, step);
      group.step = step;
    }
    if (out[chain].empty()) out[chain].push_back({number++, {}, step});
  }
  if (out.size() > 1) take_steps(out);
  return out;
}

Groups chained_as_one(const Groups& groups) {
  std::vector<MegatronGroup> all;
  for (const auto& [chain, of_chain] : groups)
    all.insert(all.end(), of_chain.begin(), of_chain.end());
  std::ranges::sort(
      all, [](const MegatronGroup& a, const MegatronGroup& b) { return a.number < b.number; });
  return {{"", std::move(all)}};
}

Result<std::vector<DecidedGroup>> decided_groups(const std::vector<MegatronGroup>& groups,
                                                 const std::vector<std::string>& names,
                                                 const std::vector<std::string>& said,
                                                 std::string& undecided,
                                                 std::vector<std::string>& warnings) {
  std::map<int64_t, std::vector<std::string>> patterns;
  for (const std::string& text : said) {
    const auto member = member_of(text);
    const bool here = member && std::ranges::any_of(groups, [&](const MegatronGroup& group) {
                        return group.number == member->group;
                      });
    if (here) patterns[member->group].push_back(member->pattern);
  }
  if (patterns.empty()) {
    ASSIGN_OR_RETURN(one, agreed(groups, undecided, warnings));
    one.params = names;
    return std::vector<DecidedGroup>{std::move(one)};
  }
  std::vector<DecidedGroup> out;
  std::vector<size_t> unnamed;
  for (const MegatronGroup& group : groups) {
    if (!patterns.contains(group.number)) unnamed.push_back(out.size());
    out.push_back({group.settings, group.step.value_or(-1), {}});
  }
  for (const std::string& name : names) {
    std::vector<size_t> in;
    for (size_t g = 0; g < groups.size(); ++g) {
      const auto of = patterns.find(groups[g].number);
      if (of != patterns.end() && name_fits(name, of->second)) in.push_back(g);
    }
    if (in.size() > 1)
      return usage(printable(name) + ": --group puts it into groups " +
                   std::to_string(groups[in[0]].number) + " and " +
                   std::to_string(groups[in[1]].number));
    if (in.empty() && unnamed.size() != 1)
      return usage(printable(name) + ": no --group puts it into one of groups " +
                   numbers_of(groups) +
                   (unnamed.empty() ? "" : ", and more than one of them has no pattern"));
    DecidedGroup& group = out[in.empty() ? unnamed[0] : in[0]];
    if (group.step < 0)
      return bad("the common state does not say how many steps the optimizer has made");
    group.params.push_back(name);
  }
  std::erase_if(out, [](const DecidedGroup& group) { return group.params.empty(); });
  return out;
}

Status check_members(const Groups& groups,
                     const std::map<std::string, std::vector<std::string>>& params,
                     const std::vector<std::string>& said) {
  for (const std::string& text : said) {
    const auto member = member_of(text);
    if (!member)
      return usage(
          "--group takes N=PATTERN, the number of a group of the common state and the names in it, "
          "such as '1=*.bias', not '" +
          printable(text) + "'");
    const std::string what = "--group '" + printable(text) + "' ";
    std::string all;
    const std::string* chain = nullptr;
    for (const auto& [name, of_chain] : groups) {
      all += (all.empty() ? "" : ", ") + numbers_of(of_chain);
      for (const MegatronGroup& group : of_chain)
        if (group.number == member->group) chain = &name;
    }
    if (chain == nullptr)
      return usage(what + "names a group that is not there: the common state has " + all);
    const auto names = params.find(*chain);
    const bool fits =
        names != params.end() && std::ranges::any_of(names->second, [&](const std::string& name) {
          return name_fits(name, {member->pattern});
        });
    if (!fits)
      return usage(what + "matches no parameter" +
                   (groups.size() > 1 ? " of that group's optimizer, chained_" + *chain : ""));
  }
  return fine();
}

}  // namespace lowbit::ckpt
