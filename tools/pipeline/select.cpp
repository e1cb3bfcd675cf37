#include "pipeline/select.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "dialect/tree/algorithm.h"
#include "dialect/tree/cpu_offload.h"
#include "dialect/tree/optimizer_root.h"
#include "io/glob.h"
#include "io/read/file.h"
#include "io/read/open.h"
#include "io/text.h"
#include "io/write/checkpoint_folder.h"
#include "io/write/partial_name.h"
#include "pickle/numpy_value.h"

namespace lowbit::ckpt {
namespace {

bool any_matches(const std::vector<std::string>& patterns, std::string_view name) {
  return std::ranges::any_of(patterns,
                             [name](const std::string& p) { return glob_matches(p, name); });
}

/// A pattern that fits no name is a typing mistake: what to say of each.
std::vector<std::string> unmatched(const char* option, const std::vector<std::string>& patterns,
                                   const std::vector<std::string>& names) {
  std::vector<std::string> lines;
  for (const std::string& pattern : patterns) {
    if (std::ranges::any_of(names,
                            [&](const std::string& name) { return glob_matches(pattern, name); }))
      continue;
    lines.push_back(std::string(option) + " '" + printable(pattern) +
                    "' matches nothing in the checkpoint; inspect lists its names");
  }
  return lines;
}

}  // namespace

void append(std::vector<std::string>& to, const std::vector<std::string>& lines) {
  to.insert(to.end(), lines.begin(), lines.end());
}

std::vector<std::string> leaf_names(const Document& document) {
  std::vector<std::string> names;
  for (const Leaf& leaf : document.leaves) names.push_back(leaf.name());
  return names;
}

bool selected(const Selection& selection, std::string_view name) {
  return (selection.include.empty() || any_matches(selection.include, name)) &&
         !any_matches(selection.exclude, name);
}

bool selected(const Selection& selection, const std::vector<std::string>& names) {
  const auto any = [&](const std::vector<std::string>& patterns) {
    return std::ranges::any_of(
        names, [&](const std::string& name) { return any_matches(patterns, name); });
  };
  return (selection.include.empty() || any(selection.include)) && !any(selection.exclude);
}

std::vector<std::string> names_of(const std::string& name, const State& state) {
  std::vector<std::string> names = {name};
  for (const Leaf* leaf : state.leaves) names.push_back(leaf->name());
  return names;
}

Document select(Document document, const Selection& selection) {
  if (selection.include.empty() && selection.exclude.empty()) return document;
  std::erase_if(document.leaves,
                [&](const Leaf& leaf) { return !selected(selection, leaf.name()); });
  return document;
}

namespace {

/// What tells a key of a path from any other.
std::string identity(const Key& key) {
  return std::to_string(static_cast<int>(key.kind)) + key.text() + '\x1f';
}

/// The path of entry i of a dict of attributes: a key that is no text has its number.
Path entry_path(const Path& path, const Value& dict, size_t i) {
  const Value& key = dict.items[i];
  return below(path, key.is(Value::Kind::kText) ? key.text : "key " + std::to_string(i / 2));
}

/// Erases those entries of a dict of attributes, also deeper in it, of which `keep(path, key,
/// value)` is false.
template <class Keep>
void keep_entries(Value& dict, const Path& path, const Keep& keep) {
  std::vector<Value> kept;
  for (size_t i = 0; i + 1 < dict.items.size(); i += 2) {
    const Path at = entry_path(path, dict, i);
    Value &key = dict.items[i], &value = dict.items[i + 1];
    if (!keep(at, key, value)) continue;
    if (value.is_dict()) keep_entries(value, at, keep);
    kept.push_back(std::move(key));
    kept.push_back(std::move(value));
  }
  dict.items = std::move(kept);
}

/// Erases the opaque entries of attributes of which `keep(name, value)` is false.
template <class Keep>
void keep_opaque(DictInfo& info, const Keep& keep) {
  if (!info.attributes.is_opaque()) return;
  keep_entries(info.attributes, info.path,
               [&](const Path& path, const Value& key, const Value& value) {
                 const Value& opaque = key.is_opaque() ? key : value;
                 return !opaque.is_opaque() || keep(flat_name(path), opaque);
               });
}

/// Calls `use(i, list, place)` for each path[i] that is the place of a list, with what identifies
/// the list and the place, until it returns false.
template <class Use>
void for_places(const Path& path, const Use& use) {
  std::string at;
  for (size_t i = 0; i < path.size(); ++i) {
    const std::string list = at;
    at += identity(path[i]);
    const bool listed = path[i].kind == Key::Kind::kIndex || path[i].kind == Key::Kind::kTupleIndex;
    if (listed && !use(i, list, at)) return;
  }
}

}  // namespace

Document select_to_write(Document document, const Selection& selection,
                         std::vector<std::string>& warnings) {
  if (selection.include.empty() && selection.exclude.empty()) return document;
  append(warnings, warn_of_exclude(document, selection));
  std::map<std::string, int64_t> ends;  // the last place of each list that stays
  std::set<std::string> places;         // those that hold something
  for (const Leaf& leaf : document.leaves) {
    if (!selected(selection, leaf.name())) continue;
    for_places(leaf.path, [&](size_t i, const std::string& list, const std::string& place) {
      int64_t& end = ends.try_emplace(list, leaf.path[i].number).first->second;
      end = std::max(end, leaf.path[i].number);
      places.insert(place);
      return true;
    });
  }
  constexpr size_t kShown = 5;
  size_t empty = 0;
  std::vector<Leaf> leaves;
  for (Leaf& leaf : document.leaves) {
    if (selected(selection, leaf.name())) {
      leaves.push_back(std::move(leaf));
      continue;
    }
    for_places(leaf.path, [&](size_t i, const std::string& list, const std::string& place) {
      const auto end = ends.find(list);
      if (end == ends.end() || leaf.path[i].number > end->second) return false;
      if (!places.insert(place).second) return true;
      Leaf none;
      none.kind = Leaf::Kind::kValue;
      none.path.assign(leaf.path.begin(), leaf.path.begin() + static_cast<std::ptrdiff_t>(i) + 1);
      none.value = Value::none();
      if (empty++ < kShown)
        warnings.push_back(printable(none.name()) +
                           ": is left out, and None stands at its place in the list");
      leaves.push_back(std::move(none));
      return false;
    });
  }
  if (empty > kShown)
    warnings.push_back(std::to_string(empty - kShown) +
                       " more places of lists are left out, and hold None");
  document.leaves = std::move(leaves);
  for (DictInfo& info : document.dicts)
    keep_opaque(info, [&](const std::string& name, const Value&) {
      return !any_matches(selection.exclude, name);
    });
  return document;
}

std::vector<std::pair<std::string, Value>> opaque_attributes(const Document& document) {
  std::vector<std::pair<std::string, Value>> out;
  for (DictInfo info : document.dicts) {
    keep_opaque(info, [&](const std::string& name, const Value& value) {
      out.emplace_back(name, value);
      return true;
    });
  }
  return out;
}

std::vector<std::string> warn_of_leftovers(const std::string& target) {
  std::vector<std::string> warnings;
  for (const std::string& left : leftovers_of(target))
    warnings.push_back(printable(left) +
                       " was left by a run that was killed; delete it, unless another run is "
                       "writing it now");
  return warnings;
}

std::vector<std::string> warn_of_others(const std::string& target) {
  const auto there = folder_content(target);
  if (!there.ok() || there.value().others.empty()) return {};
  return {printable(target) + ": " + there.value().names() +
          (there.value().others.size() == 1 ? " stays" : " stay") + " beside the new checkpoint"};
}

std::vector<std::string> warn_of_left_behind(const Manifest& source) {
  if (source.kind != ContainerKind::kDcp) return {};
  const auto folder = open_folder(source.path);
  const auto names = folder.ok() ? folder.value()->list() : folder.error();
  if (!names.ok()) return {};
  FolderContent content;
  for (const std::string& name : names.value()) {
    const auto& files = source.file_names;
    // A data file that nothing names has a warning of its own, and Megatron's files a check.
    const bool megatron = name == "common.pt" || name == "metadata.json";
    if (name == "." || name == ".." || is_dcp_file(name) || name.ends_with(".distcp") || megatron ||
        std::ranges::find(files, name) != files.end())
      continue;
    content.others.push_back(name);
  }
  if (content.others.empty()) return {};
  std::ranges::sort(content.others);
  const bool lightning = std::ranges::find(content.others, "meta.pt") != content.others.end();
  return {content.names() + " beside the checkpoint: not copied to the target" +
          (lightning ? "; Lightning resumes only where its meta.pt lies too: copy that" : "")};
}

std::vector<std::string> warn_of_texts(const Manifest& source, ContainerKind target) {
  if (target == ContainerKind::kSafetensors) return {};
  std::vector<std::string> names;
  for (const auto& [key, text] : source.texts) {
    if (key != "format") names.push_back(key);
  }
  if (names.empty()) return {};
  return {"__metadata__ (" + some_of(names) + ") is left out: only safetensors files have it"};
}

std::vector<std::string> warn_of_top_level(const Document& source) {
  if (source.manifest->kind == ContainerKind::kDcp || source.leaves.empty()) return {};
  const std::string what = printable(source.manifest->path);
  const Path& path = source.leaves[0].path;
  if (path.empty())
    return {
        what +
        ": is one value, not a dict: torch's dcp.load finds it under the name '', and "
        "dcp_to_torch_save fails on such a directory; lowbit-ckpt convert makes the file again"};
  const bool tuple = path[0].kind == Key::Kind::kTupleIndex;
  if (!tuple && path[0].kind != Key::Kind::kIndex) return {};
  return {what + ": is a " + (tuple ? "tuple" : "list") +
          ", not a dict: torch reads the directory as a dict with the keys '0', '1', ...; "
          "lowbit-ckpt convert makes the file again"};
}

namespace {

std::string name_of(const Leaf& leaf) {
  return leaf.path.empty() ? "the whole" : printable(leaf.name());
}

/// Leaves that the target would lack, with tensors or arrays in them: nothing leaves those out
/// unasked.
Error would_lose(const Document& document, const std::vector<std::string>& lost, bool tensors,
                 size_t shown, ContainerKind target) {
  std::string names;
  for (size_t i = 0; i < std::min(lost.size(), shown); ++i)
    names += (i == 0 ? "" : i + 1 == lost.size() ? " and " : ", ") + lost[i];
  if (lost.size() > shown) names += " and " + std::to_string(lost.size() - shown) + " more";
  const bool from_directory = document.manifest->kind == ContainerKind::kDcp;
  const bool keeps = from_directory && target != ContainerKind::kDcp;
  return bad(printable(document.manifest->path) + ": holds " +
             (tensors ? "tensors that are" : "arrays of numbers that are") +
             " not read, and the target would be without them: " + names +
             "; --exclude PATTERN leaves them out" +
             (keeps ? ", and a directory as the target keeps them" : ""));
}

constexpr size_t kShown = 5;

/// What a target lacks because it is opaque.
struct LeftOut {
  std::vector<std::string> warnings, lost;
  size_t count = 0;
  bool tensors = false;  // among the lost

  void add(const std::string& name, const Value& value) {
    tensors |= value.holds_tensor();
    if (value.holds_tensor() || value.holds_array())
      lost.push_back(name + " (" + opaque_names(value) + ")");
    if (count++ < kShown)
      warnings.push_back(name + ": is opaque (" + opaque_names(value) + ") and is left out");
  }
};

/// Whether an attribute of an OrderedDict is the `_metadata` of a module's state dict, with the
/// versions of modules alone. Every such dict has it, and torch loads one without it.
bool is_versions(const Value& key, const Value& value) {
  if (!key.is(Value::Kind::kText) || key.text != "_metadata" || !value.is_dict()) return false;
  for (size_t i = 1; i < value.items.size(); i += 2) {
    const Value& module = value.items[i];
    const bool version =
        module.is_dict() &&
        (module.items.empty() || (module.items.size() == 2 && module.find("version") != nullptr &&
                                  !module.items[1].is_opaque()));
    if (!version) return false;
  }
  return true;
}
bool has_versions_alone(const Value& attributes) {
  for (size_t i = 0; i + 1 < attributes.items.size(); i += 2) {
    if (!is_versions(attributes.items[i], attributes.items[i + 1])) return false;
  }
  return true;
}

/// Erases what the target cannot have of the attributes of OrderedDicts.
void leave_out_attributes(Document& document, ContainerKind target, LeftOut& out) {
  const bool directory = target == ContainerKind::kDcp;
  std::set<std::string> written;  // the places of dicts that the target has, once it is asked for
  std::vector<std::string> plain;
  for (DictInfo& info : document.dicts) {
    Value& attributes = info.attributes;
    if (!attributes.is_opaque() && !(directory && !has_versions_alone(attributes))) continue;
    if (written.empty()) {
      for (const Leaf& leaf : document.leaves) {
        std::string at;
        written.insert(at);
        for (const Key& key : leaf.path) written.insert(at += identity(key));
      }
    }
    std::string at;
    for (const Key& key : info.path) at += identity(key);
    if (!written.contains(at)) continue;
    keep_entries(attributes, info.path, [&](const Path& path, const Value& key, Value& value) {
      if (value.is_writable() && target == ContainerKind::kSafetensors)
        value = with_numbers(std::move(value));
      const bool arrays =
          value.is_writable() && !directory && target != ContainerKind::kSafetensors;
      if (!key.is_opaque() && (value.is_dict() || arrays || !value.is_opaque())) return true;
      out.add(printable(flat_name(path)), key.is_opaque() ? key : value);
      return false;
    });
    if (attributes.items.empty()) attributes = Value::none();
    for (size_t i = 0; directory && i + 1 < attributes.items.size(); i += 2) {
      if (!is_versions(attributes.items[i], attributes.items[i + 1]))
        plain.push_back(flat_name(entry_path(info.path, attributes, i)));
    }
  }
  if (!plain.empty())
    out.warnings.push_back("attributes of OrderedDicts (" + some_of(plain) +
                           ") are left out: a directory keeps none");
}

}  // namespace

Result<std::vector<std::string>> leave_out_opaque(Document& document, ContainerKind target) {
  const bool directory = target == ContainerKind::kDcp;
  LeftOut out;
  std::vector<Leaf> kept;
  size_t places = 0;  // of lists, which stay without what was there
  for (Leaf& leaf : document.leaves) {
    if (leaf.value.is_writable() && target == ContainerKind::kSafetensors) {
      leaf.value = with_numbers(std::move(leaf.value));
      if (!leaf.value.is_opaque()) leaf.kind = Leaf::Kind::kValue;
    }
    const bool copied = directory && leaf.blob != nullptr && leaf.blob->extent.length > 0;
    const bool writable = leaf.value.is_writable() && target != ContainerKind::kSafetensors;
    if (leaf.kind == Leaf::Kind::kOpaque && writable && !copied) {
      leaf.kind = Leaf::Kind::kValue;
    } else if (leaf.kind == Leaf::Kind::kOpaque && leaf.value.is_opaque() && !copied) {
      out.add(name_of(leaf), leaf.value);
      const bool listed = std::ranges::any_of(leaf.path, [](const Key& key) {
        return key.kind == Key::Kind::kIndex || key.kind == Key::Kind::kTupleIndex;
      });
      if (!listed) continue;
      ++places;
      leaf.kind = Leaf::Kind::kValue;
      leaf.value = Value::none();
      leaf.blob = nullptr;
    }
    kept.push_back(std::move(leaf));
  }
  const bool nothing = out.count > 0 && kept.size() == places;
  document.leaves = std::move(kept);
  leave_out_attributes(document, target, out);
  if (!out.lost.empty()) return would_lose(document, out.lost, out.tensors, kShown, target);
  if (out.count > kShown)
    out.warnings.push_back(std::to_string(out.count - kShown) +
                           " more opaque values are left out; inspect names them");
  if (nothing)
    return bad(fmt::format("{}: nothing of it would be left to write: {}",
                           printable(document.manifest->path), fmt::join(out.warnings, "; ")));
  return std::move(out.warnings);
}

namespace {

/// What to do about an object in an optimizer's state.
std::string advice_on(const Value& object) {
  const std::string names = opaque_names(object);
  // Without its projector the state of a smaller matrix would be left, for no optimizer.
  if (names.starts_with("galore_torch.") || names.starts_with("apollo_torch."))
    return "no other optimizer takes its step: continue with that optimizer, or start a new one "
           "from the weights";
  return "--exclude leaves it out";
}

}  // namespace

Status check_no_opaque_state(const Document& document, bool converted, ContainerKind target) {
  std::vector<OptimizerRoot> roots = optimizer_roots(document), chosen;
  if (document.optimizer) {
    chosen = joined_offload(document, roots);
    std::erase_if(chosen, [&](const OptimizerRoot& root) {
      return flat_name(root.path) != *document.optimizer;
    });
    std::erase_if(roots, [&](const OptimizerRoot& root) {
      return std::ranges::none_of(chosen, [&](const OptimizerRoot& one) {
        return one.offload ? is_below(root.path, one.path) : root.path == one.path;
      });
    });
  }
  for (const Leaf& leaf : document.leaves) {
    const bool tensor = leaf.value.is_unread_tensor();
    const bool array = leaf.value.is_writable() && target == ContainerKind::kSafetensors;
    if (leaf.kind != Leaf::Kind::kOpaque || !(converted || tensor || array)) continue;
    const Path path = nested_path(document, leaf);
    for (const OptimizerRoot& root : roots) {
      const size_t n = root.path.size();
      if (path.size() <= n || !is_below(path, root.path) || !path[n].is_name()) continue;
      const std::string& key = path[n].name;
      const bool state =
          (key == "state" && path.size() > n + (tensor ? 1 : 2)) || key.starts_with("state.");
      // A user's own objects may be left out, what the optimizer computes with may not.
      const bool nested = key == "param_groups" && path.size() > n + 2;
      const bool flat = key.starts_with("param_groups.");
      const std::string name = nested ? path[n + 2].text() : key.substr(key.rfind('.') + 1);
      const bool setting = (nested || flat) && (name == "params" || is_setting(name));
      const std::string last = path.back().text();
      const bool moment = state && is_moment(last.substr(last.rfind('.') + 1));
      // An array of no dimensions is a number, whoever reads it, but where a tensor belongs.
      const bool number =
          !moment && leaf.value.is_opaque() && !with_numbers(leaf.value).is_opaque();
      if ((state || setting) && !number)
        return bad(printable(leaf.name()) + ": is opaque (" + opaque_names(leaf.value) +
                   "), and the optimizer cannot continue without it; " + advice_on(leaf.value));
    }
  }
  return fine();
}

Status check_selection(const Document& document, const Selection& selection) {
  return selection.include.empty() ? fine() : check_selection(leaf_names(document), selection);
}

std::vector<std::string> warn_of_exclude(const std::vector<std::string>& names,
                                         const Selection& selection) {
  return unmatched("--exclude", selection.exclude, names);
}

std::vector<std::string> warn_of_exclude(const Document& document, const Selection& selection) {
  if (selection.exclude.empty()) return {};
  std::vector<std::string> names = leaf_names(document);
  for (auto& [name, value] : opaque_attributes(document)) names.push_back(std::move(name));
  return warn_of_exclude(names, selection);
}

Status check_selection(const std::vector<std::string>& names, const Selection& selection) {
  const auto lines = unmatched("--include", selection.include, names);
  return lines.empty() ? fine() : Status(usage(lines.front()));
}

}  // namespace lowbit::ckpt
