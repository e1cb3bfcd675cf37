#include "dialect/tree/optimizer_tree.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "dialect/megatron_view/megatron.h"
#include "dialect/numbers/numbers.h"
#include "dialect/tree/cpu_offload.h"
#include "dialect/tree/model_order.h"
#include "dialect/tree/nested_value.h"
#include "dialect/tree/optimizer_root.h"
#include "io/text.h"
#include "pickle/numpy_value.h"

namespace lowbit::ckpt {
namespace {

constexpr std::string_view kFlatGroups = "param_groups.";  // of a flattened state dict

bool digits(std::string_view s) {
  return !s.empty() && s.size() < 19 && s.find_first_not_of("0123456789") == std::string_view::npos;
}

/// The same number for equal values.
size_t hash_of(const Value& value) {
  size_t made = std::hash<double>()(value.real) ^ std::hash<std::string>()(value.text);
  const auto add = [&](size_t more) { made = made * 31 + more; };
  add(static_cast<size_t>(value.kind));
  add(static_cast<size_t>(value.integer));
  for (const Value& item : value.items) add(hash_of(item));
  return made;
}

size_t hash_of(const Settings& settings) {
  size_t made = 0;
  for (const auto& [name, value] : settings)
    made = made * 31 + (std::hash<std::string>()(name) ^ hash_of(value));
  return made;
}

/// A leaf below param_groups.
struct Setting {
  Path path;
  Value value;         // none of an array
  const Leaf* tensor;  // null where it is a plain value
  bool array;          // a tensor of other than one element
};

class Finder {
 public:
  Finder(const Document& document, OptimizerTree& out) : document_(document), out_(out) {}

  Status run() {
    for (const Leaf& leaf : document_.leaves) {
      const Path path = nested_path(document_, leaf);
      const size_t n = out_.root.size();
      if (path.size() <= n || !is_below(path, out_.root) || !path[n].is_name()) {
        out_.rest.push_back(&leaf);
        continue;
      }
      const std::string& key = path[n].name;
      if (key == "state" && path.size() > n + 2) {
        Path name(path.begin() + static_cast<std::ptrdiff_t>(n) + 2, path.end());
        entry(path[n + 1].text()).leaves.emplace_back(flat_name(name), with_number(leaf));
      } else if (key.starts_with("state.") && path.size() == n + 1) {
        flat_states_.emplace_back(key.substr(6), with_number(leaf));
      } else if (key == "param_groups" || key.starts_with(kFlatGroups)) {
        RETURN_IF_ERROR(group_leaf(path, n, leaf));
      } else {
        out_.rest.push_back(&leaf);
      }
    }
    nest_flat_groups();
    for (const auto& [name, leaf] : flat_states_) {
      const size_t dot = name.rfind('.');
      if (dot == std::string::npos) continue;
      entry(name.substr(0, dot)).leaves.emplace_back(name.substr(dot + 1), leaf);
    }
    return order();
  }

 private:
  Entry& entry(const std::string& key) {
    const auto [at, fresh] = place_.try_emplace(key, entries_.size());
    if (fresh) {
      entries_.emplace_back();
      entries_.back().key = key;
    }
    return entries_[at->second];
  }

  /// The leaf; of an array of numpy without dimensions, such as a count of steps, its number.
  const Leaf* with_number(const Leaf& leaf) {
    if (!leaf.value.is_opaque()) return &leaf;
    Value number = with_numbers(leaf.value);
    if (number.is_opaque()) return &leaf;
    Leaf made = leaf;
    made.kind = Leaf::Kind::kValue;
    made.value = std::move(number);
    return out_.numbers.emplace_back(std::make_shared<const Leaf>(std::move(made))).get();
  }

  Status group_leaf(const Path& path, size_t n, const Leaf& leaf) {
    Value plain = with_numbers(leaf.value);
    const bool opaque =
        leaf.kind == Leaf::Kind::kOpaque && (!leaf.value.is_opaque() || plain.is_opaque());
    if (opaque || leaf.kind == Leaf::Kind::kSubclass) {
      return bad(printable(leaf.name()) +
                 ": is not a plain value, so what the optimizer is set to cannot be read");
    }
    const bool tensor = leaf.kind == Leaf::Kind::kTensor;
    Setting made{Path(path.begin() + static_cast<std::ptrdiff_t>(n), path.end()), std::move(plain),
                 tensor ? &leaf : nullptr, tensor && volume(leaf.shape) != 1};
    if (made.array) {
      out_.warnings.push_back(printable(leaf.name()) + ": is a tensor and is left out");
    } else if (tensor) {
      ASSIGN_OR_RETURN(number, number_of(leaf));
      made.value = std::move(number);
    }
    if (path[n].name == "param_groups") {
      made.path.erase(made.path.begin());
      if (!put_setting(made))
        return bad(printable(leaf.name()) + ": is not a valid path inside param_groups");
    } else {
      made.path[0].name = made.path[0].name.substr(kFlatGroups.size());
      flat_groups_.push_back(std::move(made));
    }
    return fine();
  }

  /// Stores a setting of a numbered group; false where its path is not valid.
  bool put_setting(const Setting& setting) {
    if (setting.tensor != nullptr && setting.path.size() > 1)
      (setting.array ? arrays_ : tensors_)[setting.path[0].number].emplace_back(
          Path(setting.path.begin() + 1, setting.path.end()), setting.tensor);
    return setting.array || groups_.put(setting.path, setting.value, room_);
  }

  /// "param_groups.<x>.<name>": x is a group's number where one of the names is `params`, else a
  /// parameter.
  void nest_flat_groups() {
    bool nested = false;
    for (const Setting& setting : flat_groups_) {
      const std::string& name = setting.path[0].name;
      const size_t dot = name.find('.');
      nested |=
          dot != std::string::npos && digits(name.substr(0, dot)) && name.substr(dot) == ".params";
    }
    out_.flattened =
        (!flat_groups_.empty() && !nested) || (flat_groups_.empty() && !flat_states_.empty());
    struct Flat {
      NestedValue settings;
      Group group;
      bool met = false;  // a setting that is no array
    };
    std::map<std::string, Flat> of;
    std::vector<std::string> order;
    for (const auto& [path, value, tensor, array] : flat_groups_) {
      const std::string& name = path[0].name;
      const size_t dot = nested ? name.find('.') : name.rfind('.');
      if (dot == std::string::npos || (nested && !digits(name.substr(0, dot)))) continue;
      const std::string key = name.substr(0, dot);
      Path way(path.begin() + 1, path.end());
      way.insert(way.begin(), Key(name.substr(dot + 1)));
      if (nested) {
        way.insert(way.begin(), Key(Key::Kind::kIndex, std::stoll(key)));
        numbered_groups_.push_back({way, value, tensor, array});
        continue;
      }
      Flat& flat = of[key];
      if (array) {
        way.insert(way.begin(), Key(key));
        flat.group.arrays.emplace_back(std::move(way), tensor);
        continue;
      }
      if (!std::exchange(flat.met, true)) order.push_back(key);
      flat.settings.put(way, value, room_);
      if (tensor != nullptr) flat.group.tensors.emplace_back(std::move(way), tensor);
    }
    // Flat names are sorted, so "10" comes before "2".
    std::ranges::stable_sort(numbered_groups_, [](const auto& a, const auto& b) {
      return a.path[0].number < b.path[0].number;
    });
    for (const Setting& setting : numbered_groups_) put_setting(setting);
    // Parameters of equal settings are one group.
    std::unordered_multimap<size_t, size_t> known;
    for (const std::string& key : order) {
      Group& group = of[key].group;
      const Value said = of[key].settings.take();
      for (size_t i = 0; i + 1 < said.items.size(); i += 2)
        group.settings.emplace_back(said.items[i].text, said.items[i + 1]);
      const size_t hash = hash_of(group.settings);
      const auto [first, last] = known.equal_range(hash);
      const auto same = std::find_if(first, last, [&](const auto& at) {
        return flat_[at.second].first.settings == group.settings;
      });
      const size_t place = same == last ? flat_.size() : same->second;
      if (same == last) {
        known.emplace(hash, place);
        flat_.push_back({std::move(group), {}});
      } else {
        auto& arrays = flat_[place].first.arrays;
        arrays.insert(arrays.end(), group.arrays.begin(), group.arrays.end());
      }
      flat_[place].second.push_back(key);
    }
  }

  /// Parameters in the groups' order, then those that no group has.
  Status order() {
    std::unordered_set<std::string> taken;
    const auto take = [&](const std::string& key, Group& group) {
      group.params.push_back(out_.params.size());
      out_.params.push_back(place_.contains(key) ? entries_[place_[key]] : Entry{key, {}, -1, {}});
      taken.insert(key);
      return out_.params.size() - 1;
    };
    for (auto& [group, keys] : flat_) {
      for (const std::string& key : keys) out_.params[take(key, group)].name = key;
      out_.groups.push_back(group);
    }
    const Value groups = groups_.take();
    for (size_t number = 0; number < groups.items.size(); ++number) {
      const Value& said = groups.items[number];
      Group group;
      if (!said.is_dict()) return bad("param_groups holds something that is not a group");
      if (const auto at = tensors_.find(static_cast<int64_t>(number)); at != tensors_.end())
        group.tensors = at->second;
      if (const auto at = arrays_.find(static_cast<int64_t>(number)); at != arrays_.end())
        group.arrays = at->second;
      const Value *params = said.find("params"), *names = said.find("param_names");
      for (size_t i = 0; i + 1 < said.items.size(); i += 2) {
        if (said.items[i].is(Value::Kind::kText) && said.items[i].text != "params")
          group.settings.emplace_back(said.items[i].text, said.items[i + 1]);
      }
      for (size_t i = 0; params != nullptr && i < params->items.size(); ++i) {
        const Value& id = params->items[i];
        const bool number = id.is(Value::Kind::kInt);
        if (!number && !id.is(Value::Kind::kText))
          return bad("a group's params are neither names nor numbers");
        const std::string key = number ? std::to_string(id.integer) : id.text;
        if (taken.contains(key)) return bad(printable(key) + ": is in two parameter groups");
        const size_t at = take(key, group);
        Entry& entry = out_.params[at];
        if (number) {
          out_.numbered = true;
          entry.index = id.integer;
          if (names != nullptr && i < names->items.size() && names->items[i].is(Value::Kind::kText))
            entry.name = names->items[i].text;
        } else {
          entry.name = key;
        }
      }
      out_.groups.push_back(std::move(group));
    }
    append_ungrouped(taken);
    number_addresses();
    return fine();
  }

  /// Torch before 1.0 numbered parameters by their addresses: what counts is the groups' order.
  void number_addresses() {
    const auto count = static_cast<int64_t>(out_.params.size());
    const bool addresses = std::ranges::any_of(out_.params, [count](const Entry& e) {
      return e.index >= std::max<int64_t>(count, 1 << 20);
    });
    if (out_.groups.empty() || !addresses) return;
    out_.warnings.push_back(
        "parameters are numbered by address, as old torch did: they are taken in the groups' "
        "order");
    for (int64_t i = 0; i < count; ++i) out_.params[static_cast<size_t>(i)].index = i;
  }

  /// Appends the entries that no group took. Without any group all-digit keys are numbers.
  void append_ungrouped(const std::unordered_set<std::string>& taken) {
    if (out_.groups.empty()) {
      out_.warnings.push_back("there are no parameter groups: settings are the target's defaults");
      out_.numbered = !entries_.empty() &&
                      std::ranges::all_of(entries_, [](const Entry& e) { return digits(e.key); });
      if (out_.numbered)
        std::ranges::sort(entries_, [](const Entry& a, const Entry& b) {
          return std::stoll(a.key) < std::stoll(b.key);
        });
    }
    for (Entry& entry : entries_) {
      if (taken.contains(entry.key)) continue;
      if (!out_.groups.empty())
        out_.warnings.push_back(printable(entry.key) + ": has state but is in no parameter group");
      if (out_.numbered && digits(entry.key)) {
        entry.index = std::stoll(entry.key);
      } else {
        entry.name = entry.key;
      }
      out_.params.push_back(std::move(entry));
    }
  }

  const Document& document_;
  OptimizerTree& out_;
  std::vector<Entry> entries_;
  std::unordered_map<std::string, size_t> place_;
  int64_t room_ = 1 << 20;  // items of lists
  NestedValue groups_{Value::Kind::kList};
  std::vector<std::pair<std::string, const Leaf*>> flat_states_;
  std::vector<Setting> flat_groups_, numbered_groups_;
  // Settings of numbered groups that are tensors of one element, and of more, by their paths in the
  // group.
  std::map<int64_t, std::vector<std::pair<Path, const Leaf*>>> tensors_, arrays_;
  std::vector<std::pair<Group, std::vector<std::string>>> flat_;
};

std::string names_of_roots(const std::vector<OptimizerRoot>& roots) {
  std::string all;
  for (const OptimizerRoot& root : roots)
    all += (all.empty() ? "'" : ", '") + printable(flat_name(root.path)) + "'";
  return all;
}

/// Megatron-FSDP keeps no groups, but the settings and steps of each parameter by its name, and
/// names of its own for the halves of a split one.
Status check_no_group_meta(const Document& document, const Path& root) {
  const std::string meta = flat_name(below(root, "param_to_group_meta"));
  for (const Leaf& leaf : document.leaves) {
    if (leaf.name().starts_with(meta + "."))
      return bad(
          "its optimizer is Megatron-FSDP's (fsdp_dtensor), whose settings and steps are in " +
          printable(meta) +
          ", which is not read; lowbit-ckpt convert --exclude '*param_to_group_meta*' leaves them "
          "out: then settings are the defaults, and steps and bias corrections begin anew");
  }
  return fine();
}

/// Reads the optimizers of a CPUOffloadOptimizer as one.
Status join_offload(const Document& document, OptimizerTree& out) {
  ASSIGN_OR_RETURN(view, offload_view(document, out.root));
  const std::string counts = std::to_string(view.offloaded) + " offloaded parameters and " +
                             std::to_string(view.on_device) + " on the device";
  if (view.on_device > 0 && document.model == nullptr)
    return bad("its optimizer is torchao's CPUOffloadOptimizer with " + counts +
               ", and which of the model's parameters are which is not saved: lowbit-ckpt convert "
               "--model PATH, a file with the weights, tells it");
  out.warnings.push_back("the optimizer is torchao's CPUOffloadOptimizer, with " + counts +
                         ": it is read as one optimizer for all, which that class does not load");
  out.on_device = view.on_device;
  out.view = std::make_shared<const Document>(std::move(view.document));
  RETURN_IF_ERROR(Finder(*out.view, out).run());
  out.rest = std::move(view.rest);
  return fine();
}

}  // namespace

const Leaf* Entry::find(std::string_view leaf) const {
  for (const auto& [name, found] : leaves) {
    if (name == leaf) return found;
  }
  return nullptr;
}

bool has_optimizer_tree(const Document& document) { return !optimizer_roots(document).empty(); }

Result<OptimizerTree> optimizer_tree_of(const Document& document) {
  std::vector<OptimizerRoot> roots = joined_offload(document, optimizer_roots(document));
  const std::vector<OptimizerRoot> all_roots = roots;
  if (document.optimizer)
    std::erase_if(roots, [&](const OptimizerRoot& root) {
      return flat_name(root.path) != *document.optimizer;
    });
  if (roots.empty() && !all_roots.empty())
    return usage("holds no optimizer under '" + printable(*document.optimizer) + "', but under " +
                 names_of_roots(all_roots));
  if (roots.empty()) return bad("holds no optimizer state dict (no `state` and `param_groups`)");
  if (roots.size() > 1)
    return bad(
        "holds " + std::to_string(roots.size()) + " optimizer state dicts, under " +
        names_of_roots(roots) +
        "; choose one with --optimizer NAME, or leave out the others with --exclude PATTERN");
  OptimizerTree out;
  out.root = roots[0].path;
  RETURN_IF_ERROR(check_no_group_meta(document, out.root));
  if (is_megatron(document)) {
    ASSIGN_OR_RETURN(view, megatron_view(document));
    out.warnings = std::move(view.warnings);
    if (!view.undecided.empty()) out.unresolved.push_back(view.undecided);
    out.view = std::make_shared<const Document>(std::move(view.document));
    RETURN_IF_ERROR(Finder(*out.view, out).run());
    out.rest = std::move(view.rest);
    return out;
  }
  if (roots[0].offload) {
    RETURN_IF_ERROR(join_offload(document, out));
    RETURN_IF_ERROR(name_by_model(document, out));
    return out;
  }
  RETURN_IF_ERROR(Finder(document, out).run());
  for (const OptimizerRoot& other : other_roots(document))
    out.warnings.push_back("'" + printable(flat_name(other.path)) +
                           "' looks like an optimizer's state without groups, and stays as it is");
  RETURN_IF_ERROR(name_by_model(document, out));
  return out;
}

Model model_of(const OptimizerTree& tree, const std::string& dialect,
               std::shared_ptr<const Document> document) {
  Model out;
  out.dialect = dialect;
  out.root = tree.root;
  out.flattened = tree.flattened;
  out.groups = tree.groups;
  out.warnings = tree.warnings;
  out.weights = tree.weights;
  out.unresolved = tree.unresolved;
  out.view = tree.view;
  out.document = std::move(document);
  for (const Leaf* leaf : tree.rest) out.rest.push_back(*leaf);
  for (const Entry& entry : tree.params) {
    Param p;
    p.name = entry.name;
    p.index = entry.index;
    if (entry.told) p.learn(*entry.told);
    out.params.push_back(std::move(p));
  }
  return out;
}

std::string shown(const Entry& entry) {
  return entry.name.empty() ? "parameter " + printable(entry.key) : printable(entry.name);
}

std::string shown(const Param& param) {
  return param.name.empty() ? "parameter " + std::to_string(param.index) : printable(param.name);
}

const Value* setting(const Settings& settings, std::string_view name) {
  for (const auto& [key, value] : settings) {
    if (key == name) return &value;
  }
  return nullptr;
}

const Value* setting(const Group& group, std::string_view name) {
  return setting(group.settings, name);
}

bool is_on(const Group& group, std::string_view name) {
  const Value* said = setting(group, name);
  return said != nullptr && said->is_on();
}

}  // namespace lowbit::ckpt
