#include "container/deepspeed/model_states.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "io/text.h"

namespace lowbit::ckpt {
namespace {

Result<Shape> shape_of(const Value* value, const std::string& what) {
  Shape out;
  if (value == nullptr || !value->is_row()) return bad(what + ": is not a shape");
  for (const Value& size : value->items) {
    if (!size.is(Value::Kind::kInt)) return bad(what + ": is not a shape");
    out.push_back(size.integer);
  }
  if (const auto count = elements(out, what); !count.ok()) return count.error();
  return out;
}

/// Adds one name with its shape.
Status add_shape(FlatGroup& group, std::set<std::string>& seen, const Key& key, const Value* value,
                 const std::string& what) {
  const std::string name = key.text();
  ASSIGN_OR_RETURN(shape, shape_of(value, what + " of " + printable(name)));
  if (!seen.insert(name).second) return bad(what + ": has " + printable(name) + " twice");
  group.emplace_back(name, std::move(shape));
  return fine();
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  return text;
}

/// Whether DeepSpeed's own Muon made the group for Adam, which may be lines of Muon's that leave no
/// setting behind.
bool is_beside_muon(const PartFile& file, const Path& group) {
  const Value *muon = file.value(below(group, "use_muon")),
              *name = file.value(below(group, "name"));
  return muon != nullptr && muon->is(Value::Kind::kBool) && muon->integer == 0 && name != nullptr &&
         name->is(Value::Kind::kText) && name->text.ends_with("adam-params");
}

/// Whether the Adam of a configuration adds its decay to the gradient. As the engine has it, the
/// mode counts for the names Adam and Muon and is true where it is not said.
bool is_coupled(const std::string& name, const Value* mode) {
  return (name == "adam" || name == "muon") && mode != nullptr && !mode->is_on();
}

/// Whether the DeepSpeed that wrote a file left adam_w_mode in the configuration that it saves.
/// Before 0.19.1 the engine took the mode out of the user's dict. A build of 0.19.1 from source,
/// which has more behind the numbers, may be of either.
bool keeps_mode(const PartFile& model) {
  const Value* version = model.value({"ds_version"});
  if (version == nullptr || !version->is(Value::Kind::kText)) return false;
  constexpr std::array<uint32_t, 3> kFirst = {0, 19, 1};
  std::array<uint32_t, 3> numbers = {};
  const char *at = version->text.data(), *const end = at + version->text.size();
  for (uint32_t& number : numbers) {
    if (&number != numbers.data() && at != end && *at == '.') ++at;
    const auto [next, error] = std::from_chars(at, end, number);
    if (error != std::errc()) return false;
    at = next;
  }
  return numbers > kFirst || (numbers == kFirst && at == end);
}

/// Adds decoupled_weight_decay to a group of DeepSpeed's own Adam and AdamW, and warns where no
/// file tells.
Status add_decay(Parts& parts, Manifest& manifest, const PartFile& file, const Path& group,
                 const PartFile& model) {
  const bool adam = file.has_below(below(group, "bias_correction")) || is_beside_muon(file, group);
  const bool own = adam && !file.has_below(below(group, "max_coeff")) &&  // of its LAMB
                   !file.has_below(below(group, "decoupled_weight_decay"));
  if (!own) return fine();
  const Value* type = model.value({"ds_config", "optimizer", "type"});
  if (type != nullptr && type->is(Value::Kind::kText)) {
    const std::string name = lower(type->text);
    if (name != "adam" && name != "adamw" && name != "muon") return fine();
    const Value* mode = model.value({"ds_config", "optimizer", "params", "adam_w_mode"});
    if (name != "adam" || mode != nullptr || keeps_mode(model))
      return parts.add(manifest, {"optim", "param_groups", group.back(), "decoupled_weight_decay"},
                       Value::boolean(!is_coupled(name, mode)));
  }
  auto& all = manifest.warnings;
  if (file.is_on(below(group, "weight_decay")) &&
      std::ranges::find(all, kDecayNotSaved) == all.end())
    all.emplace_back(kDecayNotSaved);
  return fine();
}

}  // namespace

bool is_bookkeeping(const std::string& key) {
  for (const char* known :
       {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes",
        "shared_params", "frozen_param_fragments", "dp_world_size", "mp_world_size",
        "checkpoint_parallel_dimensions", "ds_config", "universal_checkpoint_info"}) {
    if (key == known) return true;
  }
  return false;
}

Result<ModelStates> read_model_states(const PartFile& file) {
  ModelStates out;
  std::set<std::string> seen;
  const std::string what = file.what() + ": its param_shapes";
  RETURN_IF_ERROR(file.for_below({"param_shapes"}, [&](const Path& path, const FileLeaf& leaf) {
    const bool listed = !path.empty() && path[0].kind == Key::Kind::kIndex &&
                        path[0].number <= static_cast<int64_t>(out.groups.size());
    const bool empty = path.size() == 1 && leaf.value != nullptr && leaf.value->is_dict();
    if (!listed || (path.size() != 2 && !empty))
      return Status(bad(what + " are not a list of names and shapes: it was not saved under ZeRO"));
    if (path[0].number == static_cast<int64_t>(out.groups.size())) out.groups.emplace_back();
    return empty ? fine() : add_shape(out.groups.back(), seen, path[1], leaf.value, what);
  }));
  if (out.groups.empty())
    return bad(file.what() +
               ": has no param_shapes, which ZeRO writes, so it is not known what "
               "lies where in the ranks' vectors");
  RETURN_IF_ERROR(
      file.for_below({"frozen_param_shapes"}, [&](const Path& path, const FileLeaf& leaf) {
        return path.size() == 1 ? add_shape(out.frozen, seen, path[0], leaf.value,
                                            file.what() + ": its frozen_param_shapes")
                                : fine();
      }));
  RETURN_IF_ERROR(file.for_below({"shared_params"}, [&](const Path& path, const FileLeaf& leaf) {
    if (path.size() == 1 && leaf.value != nullptr && leaf.value->is(Value::Kind::kText))
      out.shared.emplace_back(path[0].text(), leaf.value->text);
    return fine();
  }));
  if (const Value* names = file.value({"buffer_names"}); names != nullptr) {
    for (const Value& name : names->items) out.buffers.insert(name.text);
  }
  const Value* ranks = file.value({"dp_world_size"});
  constexpr int64_t kMax = 1 << 20;
  if (ranks == nullptr || !ranks->is(Value::Kind::kInt) || ranks->integer < 1 ||
      ranks->integer > kMax)
    return bad(file.what() + ": does not say how many ranks there were (dp_world_size)");
  out.ranks = ranks->integer;
  return out;
}

Status add_module(Parts& parts, Manifest& manifest, const PartFile& file, const ModelStates& states,
                  const std::set<std::string>& known, bool placeholders) {
  return file.for_below({"module"}, [&](const Path& path, const FileLeaf& leaf) -> Status {
    const std::string name = flat_name(path);
    const bool tied = std::ranges::any_of(states.shared, [&](const auto& pair) {
      return pair.first == name && known.contains(pair.second);
    });
    if (path.empty() || tied || known.contains(name)) return fine();
    const bool empty = leaf.tensor != nullptr && volume(leaf.tensor->shape) == 0;
    const bool own =
        states.buffers.contains(name) || name == "_extra_state" || name.ends_with("._extra_state");
    if (placeholders && empty && !own)
      return bad(file.what() + ": has a placeholder of " + printable(name) +
                 ", whose values are in no file of the folder");
    return parts.add(manifest, joined_path({"model"}, path), file, leaf);
  });
}

Status add_frozen(Parts& parts, Manifest& manifest, const ModelStates& states,
                  std::set<std::string>& known) {
  if (states.frozen.empty()) return fine();
  std::map<std::string, std::vector<Slice>> slices;
  const auto ranks = static_cast<uint64_t>(states.ranks);
  for (uint64_t rank = 0; rank < ranks; ++rank) {
    ASSIGN_OR_RETURN(
        file, parts.read("zero_pp_rank_" + std::to_string(rank) + "_mp_rank_00_model_states.pt"));
    for (const auto& [name, shape] : states.frozen) {
      const FileLeaf leaf = file->find({"frozen_param_fragments", name});
      if (leaf.tensor == nullptr)
        return bad(file->what() + ": has no slice of the frozen " + printable(name));
      ASSIGN_OR_RETURN(payload, file->payload(*leaf.tensor));
      const uint64_t all = volume(shape), each = (all + ranks - 1) / ranks,
                     begin = std::min(all, rank * each);
      slices[name].push_back({std::move(payload), 0, begin, std::min(each, all - begin)});
    }
  }
  std::map<std::string, const Shape*> shapes;
  for (const auto& [name, shape] : states.frozen) {
    RETURN_IF_ERROR(parts.add(manifest, {"model", name}, slices[name], shape));
    known.insert(name);
    shapes.emplace(name, &shape);
  }
  for (const auto& [name, owner] : states.shared) {
    if (!shapes.contains(owner) || !known.insert(name).second) continue;
    RETURN_IF_ERROR(parts.add(manifest, {"model", name}, slices[owner], *shapes[owner]));
  }
  return fine();
}

Status add_rest(Parts& parts, Manifest& manifest, const PartFile& file) {
  return file.for_below({}, [&](const Path& path, const FileLeaf& leaf) -> Status {
    if (path.empty() || is_bookkeeping(path[0].text())) return fine();
    if (leaf.value != nullptr && leaf.value->is(Value::Kind::kNone)) return fine();
    return parts.add(manifest, joined_path({"deepspeed"}, path), file, leaf);
  });
}

Status add_loss_scaler(Parts& parts, Manifest& manifest, const PartFile& file) {
  for (const Path& at : {Path{"optimizer_state_dict"}, Path{}}) {
    const Value* scaler = file.value(below(at, "loss_scaler"));
    if (!file.is_on(below(at, "dynamic_loss_scale"))) continue;
    const bool known = scaler != nullptr && scaler->is(Value::Kind::kOpaque) &&
                       scaler->text == kLossScaler && scaler->items.size() == 1;
    const bool plain = known && std::ranges::none_of(scaler->items[0].items, [](const Value& v) {
                         return v.is_dict() || v.is(Value::Kind::kList);
                       });
    if (!plain) {
      manifest.warnings.push_back(
          "the dynamic loss scale is kept in an object of DeepSpeed that is not the usual one (" +
          (scaler == nullptr ? "none" : printable(scaler->text)) + "), and is not read");
      return fine();
    }
    const std::vector<Value>& all = scaler->items[0].items;
    for (size_t i = 0; i + 1 < all.size(); i += 2) {
      if (all[i].is(Value::Kind::kText))
        RETURN_IF_ERROR(parts.add(manifest, {"deepspeed", "optimizer", "loss_scaler", all[i].text},
                                  all[i + 1]));
    }
    return fine();
  }
  return fine();
}

Status add_param_groups(Parts& parts, Manifest& manifest, const PartFile& file, const Path& groups,
                        const std::vector<FlatGroup>& flat, const PartFile& model) {
  std::set<int64_t> taken, numbers;
  RETURN_IF_ERROR(file.for_below(groups, [&](const Path& path, const FileLeaf& leaf) -> Status {
    const std::string what = file.what() + ": its param_groups";
    if (path.size() < 2 || path[0].kind != Key::Kind::kIndex)
      return bad(what + " are not a list of dicts");
    numbers.insert(path[0].number);
    // Names are keys here.
    if (path[1].text() == "param_names") return fine();
    Path full = joined_path({"optim", "param_groups"}, path);
    if (path[1].text() != "params") return parts.add(manifest, std::move(full), file, leaf);
    if (leaf.value == nullptr || !leaf.value->is(Value::Kind::kList))
      return bad(what + " hold params that are not a list");
    Value names = Value::list({});
    for (const Value& id : leaf.value->items) {
      const bool fits = id.is(Value::Kind::kInt) && id.integer >= 0 &&
                        id.integer < static_cast<int64_t>(flat.size());
      if (!fits || !taken.insert(id.integer).second)
        return bad(what + " do not number the " + std::to_string(flat.size()) +
                   " flat vectors of param_shapes, each once");
      for (const auto& [name, shape] : flat[static_cast<size_t>(id.integer)])
        names.items.push_back(Value::words(name));
    }
    return parts.add(manifest, std::move(full), std::move(names));
  }));
  if (taken.size() != flat.size())
    return bad(file.what() + ": its param_groups have " + std::to_string(taken.size()) +
               " of the " + std::to_string(flat.size()) + " flat vectors of param_shapes");
  for (const int64_t number : numbers)
    RETURN_IF_ERROR(
        add_decay(parts, manifest, file, below(groups, Key(Key::Kind::kIndex, number)), model));
  return fine();
}

}  // namespace lowbit::ckpt
