#include "dialect/skeleton.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "core/half.h"
#include "core/param/bfloat16.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

bool digits(std::string_view s) {
  return !s.empty() && s.size() < 19 && s.find_first_not_of("0123456789") == std::string_view::npos;
}

bool starts(std::string_view s, std::string_view with) { return s.substr(0, with.size()) == with; }

/// A leaf's path as if it had one: where only flat names are known, the part before "state." or
/// "param_groups." is taken for the root.
Path path_of(const Document& document, const Leaf& leaf) {
  if (document.manifest == nullptr || document.manifest->has_paths || leaf.path.size() != 1 ||
      !leaf.path[0].is_name())
    return leaf.path;
  const std::string& name = leaf.path[0].name;
  size_t at = std::string::npos;
  for (const char* word : {"state.", "param_groups."}) {
    size_t found = starts(name, word) ? 0 : name.find(std::string(".") + word);
    if (found != std::string::npos && found != 0) ++found;
    at = std::min(at, found);
  }
  if (at == std::string::npos) return leaf.path;
  Path out;
  for (size_t begin = 0; begin < at;) {
    const size_t end = name.find('.', begin);
    out.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  out.push_back(name.substr(at));
  return out;
}

std::string id_of(const Path& path, size_t length) {
  std::string s;
  for (size_t i = 0; i < length; ++i) s += path[i].text() + '\x1f';
  return s;
}

/// Names that only an optimizer's state has, where no groups tell that it is one.
bool is_state_name(std::string_view name) {
  for (const char* known : {"step", "exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum",
                            "state1", "row_var", "variance"}) {
    if (name == known) return true;
  }
  return false;
}

struct Root {
  Path path;
  bool groups = false, states = false;
};

/// All places that may be an optimizer state dict.
std::vector<Root> roots_of(const Document& document) {
  std::map<std::string, Root> found;
  for (const Leaf& leaf : document.leaves) {
    const Path path = path_of(document, leaf);
    for (size_t i = 0; i < path.size(); ++i) {
      if (!path[i].is_name()) continue;
      const std::string& key = path[i].name;
      const bool groups = key == "param_groups" || starts(key, "param_groups.");
      const bool state = (key == "state" && i + 2 < path.size()) || starts(key, "state.");
      if (!groups && !state) continue;
      Root& root = found[id_of(path, i)];
      root.path.assign(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(i));
      root.groups |= groups;
      const std::string last = path.back().text();
      root.states |= state && is_state_name(last.substr(last.rfind('.') + 1));
    }
  }
  std::vector<Root> with_groups, others;
  for (auto& [id, root] : found) {
    if (root.groups) with_groups.push_back(root);
    if (!root.groups && root.states) others.push_back(root);
  }
  return with_groups.empty() ? others : with_groups;
}

/// Puts a value at the end of a way of keys below `at`. Keys may come in any order, so a list grows
/// to what an index asks for; `room` is for how many items in all. False where that is too few.
bool put(Value& at, const Path& path, size_t i, const Value& value, int64_t& room) {
  if (i == path.size()) {
    at = value;
    return true;
  }
  if (i > Value::kMostDepth) return false;
  const Key& key = path[i];
  if (key.kind == Key::Kind::kIndex || key.kind == Key::Kind::kTupleIndex) {
    at.kind = key.kind == Key::Kind::kIndex ? Value::Kind::kList : Value::Kind::kTuple;
    const auto size = static_cast<int64_t>(at.items.size());
    if (key.number < 0 || key.number >= size + room) return false;
    if (key.number >= size) {
      room -= key.number + 1 - size;
      at.items.resize(static_cast<size_t>(key.number) + 1);
    }
    return put(at.items[static_cast<size_t>(key.number)], path, i + 1, value, room);
  }
  if (!at.is_dict()) at = Value{.kind = Value::Kind::kDict};
  const Value name = key.is_name() ? Value::words(key.name) : Value::number(key.number);
  for (size_t k = 0; k + 1 < at.items.size(); k += 2) {
    if (at.items[k] == name) return put(at.items[k + 1], path, i + 1, value, room);
  }
  at.items.push_back(name);
  at.items.emplace_back();
  return put(at.items.back(), path, i + 1, value, room);
}

class Finder {
 public:
  Finder(const Document& document, Skeleton& out) : document_(document), out_(out) {}

  Status run() {
    for (const Leaf& leaf : document_.leaves) {
      const Path path = path_of(document_, leaf);
      const size_t n = out_.root.size();
      if (path.size() <= n || !std::equal(out_.root.begin(), out_.root.end(), path.begin()) ||
          !path[n].is_name()) {
        out_.rest.push_back(&leaf);
        continue;
      }
      const std::string& key = path[n].name;
      if (key == "state" && path.size() > n + 2) {
        Path name(path.begin() + static_cast<std::ptrdiff_t>(n) + 2, path.end());
        entry(path[n + 1].text()).leaves.emplace_back(flat_name(name), &leaf);
      } else if (starts(key, "state.") && path.size() == n + 1) {
        flat_states_.emplace_back(key.substr(6), &leaf);
      } else if (key == "param_groups" || starts(key, "param_groups.")) {
        LB_CHECK(group_leaf(path, n, leaf));
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

  Status group_leaf(const Path& path, size_t n, const Leaf& leaf) {
    Value value;
    if (leaf.kind == Leaf::Kind::kOpaque || leaf.kind == Leaf::Kind::kSubclass) {
      return bad(printable(leaf.name()) +
                 ": is no plain value, so what the optimizer is set to cannot be read");
    }
    if (leaf.kind == Leaf::Kind::kTensor && volume(leaf.shape) != 1) {
      out_.warnings.push_back(printable(leaf.name()) + ": is a tensor and is left out");
      return fine();
    }
    LB_TRY(number, number_of(leaf));
    value = std::move(number);
    if (path[n].name == "param_groups") {
      if (!put(groups_, path, n + 1, value, room_))
        return bad(printable(leaf.name()) + ": its place in param_groups makes no sense");
    } else {
      Path rest = path;
      rest.erase(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(n));
      rest[0].name = rest[0].name.substr(13);
      flat_groups_.emplace_back(std::move(rest), std::move(value));
    }
    return fine();
  }

  /// "param_groups.<x>.<name>": x is a group's number where one of the names is `params`, else a
  /// parameter.
  void nest_flat_groups() {
    bool nested = false;
    for (const auto& [path, value] : flat_groups_) {
      const size_t dot = path[0].name.find('.');
      nested |= dot != std::string::npos && digits(path[0].name.substr(0, dot)) &&
                path[0].name.substr(dot) == ".params";
    }
    out_.flattened =
        (!flat_groups_.empty() && !nested) || (flat_groups_.empty() && !flat_states_.empty());
    std::map<std::string, Group> of;
    std::vector<std::string> order;
    for (auto& [path, value] : flat_groups_) {
      const std::string name = path[0].name;
      const size_t dot = nested ? name.find('.') : name.rfind('.');
      if (dot == std::string::npos) continue;
      Path way(path.begin() + 1, path.end());
      if (nested) {
        if (!digits(name.substr(0, dot))) continue;
        way.insert(way.begin(), Key(name.substr(dot + 1)));
        way.insert(way.begin(), Key(Key::Kind::kIndex, std::stoll(name.substr(0, dot))));
        numbered_groups_.emplace_back(way, value);
        continue;
      }
      const std::string key = name.substr(0, dot), what = name.substr(dot + 1);
      if (!of.contains(key)) order.push_back(key);
      auto& settings = of[key].settings;
      auto same = std::find_if(settings.begin(), settings.end(),
                               [&](const auto& s) { return s.first == what; });
      if (same == settings.end()) same = settings.insert(settings.end(), {what, Value::none()});
      put(same->second, way, 0, value, room_);
    }
    // Flat names are sorted, so "10" comes before "2".
    std::stable_sort(
        numbered_groups_.begin(), numbered_groups_.end(),
        [](const auto& a, const auto& b) { return a.first[0].number < b.first[0].number; });
    for (const auto& [way, value] : numbered_groups_) put(groups_, way, 0, value, room_);
    // Parameters of equal settings are one group.
    for (const std::string& key : order) {
      auto same = std::find_if(flat_.begin(), flat_.end(),
                               [&](const auto& g) { return g.first.settings == of[key].settings; });
      if (same == flat_.end()) same = flat_.insert(flat_.end(), {of[key], {}});
      same->second.push_back(key);
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
    for (const Value& said : groups_.items) {
      Group group;
      if (!said.is_dict()) return bad("param_groups holds something that is no group");
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
    if (out_.groups.empty()) {
      out_.warnings.push_back("there are no parameter groups: settings are the target's defaults");
      out_.numbered =
          !entries_.empty() && std::all_of(entries_.begin(), entries_.end(),
                                           [](const Entry& e) { return digits(e.key); });
      if (out_.numbered)
        std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
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
    return fine();
  }

  const Document& document_;
  Skeleton& out_;
  std::vector<Entry> entries_;
  std::unordered_map<std::string, size_t> place_;
  int64_t room_ = 1 << 20;  // items of lists
  Value groups_{.kind = Value::Kind::kList};
  std::vector<std::pair<std::string, const Leaf*>> flat_states_;
  std::vector<std::pair<Path, Value>> flat_groups_, numbered_groups_;
  std::vector<std::pair<Group, std::vector<std::string>>> flat_;
};

}  // namespace

const Leaf* Entry::find(std::string_view leaf) const {
  for (const auto& [name, found] : leaves) {
    if (name == leaf) return found;
  }
  return nullptr;
}

bool has_skeleton(const Document& document) { return !roots_of(document).empty(); }

Result<Skeleton> skeleton_of(const Document& document) {
  const std::vector<Root> roots = roots_of(document);
  if (roots.empty()) return bad("holds no optimizer state dict (no `state` and `param_groups`)");
  if (roots.size() > 1) {
    std::string all;
    for (const Root& root : roots)
      all += (all.empty() ? "" : ", ") + ("'" + printable(flat_name(root.path)) + "'");
    return bad("holds " + std::to_string(roots.size()) + " optimizer state dicts, under " + all +
               "; choose one with --include or --exclude");
  }
  Skeleton out;
  out.root = roots[0].path;
  LB_CHECK(Finder(document, out).run());
  return out;
}

Result<Value> number_of(const Leaf& leaf) {
  if (leaf.kind == Leaf::Kind::kValue) return leaf.value;
  if (leaf.kind != Leaf::Kind::kTensor || leaf.source == nullptr || volume(leaf.shape) != 1)
    return bad(printable(leaf.name()) + ": is no number");
  char bytes[16] = {};
  LB_CHECK(leaf.source->read(0, 1, bytes));
  const std::string_view dtype = leaf.dtype->name;
  const auto as = [&]<class T>(T x) {
    std::memcpy(&x, bytes, sizeof x);
    return x;
  };
  if (dtype == "float32") return Value::floating(static_cast<double>(as(float{})));
  if (dtype == "float64") return Value::floating(as(double{}));
  if (dtype == "bfloat16")
    return Value::floating(static_cast<double>(bfloat16_to_float(as(uint16_t{}))));
  if (dtype == "float16")
    return Value::floating(static_cast<double>(half_to_float(as(uint16_t{}))));
  if (dtype == "int64") return Value::number(as(int64_t{}));
  if (dtype == "int32") return Value::number(as(int32_t{}));
  if (dtype == "int16") return Value::number(as(int16_t{}));
  if (dtype == "int8") return Value::number(as(int8_t{}));
  if (dtype == "uint8") return Value::number(as(uint8_t{}));
  if (dtype == "bool") return Value::boolean(as(uint8_t{}) != 0);
  return bad(printable(leaf.name()) + ": is a number of dtype " + std::string(dtype));
}

Result<double> real_of(const Value& value, const std::string& what) {
  if (value.is(Value::Kind::kFloat)) return value.real;
  if (value.is(Value::Kind::kInt) || value.is(Value::Kind::kBool))
    return static_cast<double>(value.integer);
  return bad(what + ": is no number");
}

Model model_of(const Skeleton& skeleton, const std::string& dialect,
               std::shared_ptr<const Document> document) {
  Model out;
  out.dialect = dialect;
  out.root = skeleton.root;
  out.flattened = skeleton.flattened;
  out.groups = skeleton.groups;
  out.warnings = skeleton.warnings;
  out.document = std::move(document);
  for (const Leaf* leaf : skeleton.rest) out.rest.push_back(*leaf);
  for (const Entry& entry : skeleton.params) {
    Param p;
    p.name = entry.name;
    p.index = entry.index;
    p.known_shape = false;
    out.params.push_back(std::move(p));
  }
  return out;
}

Path state_path(const Model& model, const Param& param, const std::string& state) {
  Path path = model.root;
  if (model.flattened && param.index < 0) {
    path.push_back("state." + param.name + "." + state);
    return path;
  }
  path.push_back("state");
  path.push_back(param.index >= 0 ? Key(Key::Kind::kNumber, param.index) : Key(param.name));
  path.push_back(state);
  return path;
}

Leaf value_leaf(Path path, Value value) {
  Leaf leaf;
  leaf.kind = Leaf::Kind::kValue;
  leaf.path = std::move(path);
  leaf.value = std::move(value);
  return leaf;
}

Leaf tensor_leaf(Path path, const Dtype* dtype, Shape shape, std::shared_ptr<Source> source) {
  Leaf leaf;
  leaf.path = std::move(path);
  leaf.dtype = dtype;
  leaf.shape = std::move(shape);
  leaf.source = std::move(source);
  return leaf;
}

namespace {

/// Few bytes that are held.
class Held : public Source {
 public:
  Held(const void* bytes, int width)
      : bytes_(static_cast<const char*>(bytes), static_cast<size_t>(width)) {}
  Status read(uint64_t, uint64_t count, void* out) override {
    if (count > 0) std::memcpy(out, bytes_.data(), bytes_.size());
    return fine();
  }

 private:
  const std::string bytes_;
};

void add_value(Path path, const Value& value, std::vector<Leaf>& leaves) {
  if (!value.is_dict() || value.items.empty()) {
    leaves.push_back(value_leaf(std::move(path), value));
    return;
  }
  // As torch does, which enters dicts.
  for (size_t i = 0; i + 1 < value.items.size(); i += 2) {
    Path below = path;
    const Value& key = value.items[i];
    below.push_back(key.is(Value::Kind::kText) ? Key(key.text)
                                               : Key(Key::Kind::kNumber, key.integer));
    add_value(std::move(below), value.items[i + 1], leaves);
  }
}

}  // namespace

Leaf scalar_leaf(Path path, float value) {
  return tensor_leaf(std::move(path), find_dtype("float32"), {}, std::make_shared<Held>(&value, 4));
}

Leaf scalar_leaf(Path path, int64_t value) {
  return tensor_leaf(std::move(path), find_dtype("int64"), {}, std::make_shared<Held>(&value, 8));
}

void add_groups(const Model& model,
                const std::vector<std::vector<std::pair<std::string, Value>>>& settings,
                std::vector<Leaf>& leaves) {
  for (size_t g = 0; g < model.groups.size(); ++g) {
    if (model.flattened) {
      for (const size_t p : model.groups[g].params) {
        for (const auto& [name, value] : settings[g]) {
          Path path = model.root;
          path.push_back("param_groups." + model.params[p].name + "." + name);
          add_value(std::move(path), value, leaves);
        }
      }
      continue;
    }
    Path path = model.root;
    path.push_back("param_groups");
    path.push_back(Key(Key::Kind::kIndex, static_cast<int64_t>(g)));
    Value params = Value::list({});
    for (const size_t p : model.groups[g].params) {
      const Param& param = model.params[p];
      params.items.push_back(param.index >= 0 ? Value::number(param.index)
                                              : Value::words(param.name));
    }
    for (const auto& [name, value] : settings[g]) {
      Path below = path;
      below.push_back(name);
      add_value(std::move(below), value, leaves);
    }
    path.push_back("params");
    leaves.push_back(value_leaf(std::move(path), std::move(params)));
  }
}

std::string shown(const Param& param) {
  return param.name.empty() ? "parameter " + std::to_string(param.index) : printable(param.name);
}

const Value* setting(const Group& group, std::string_view name) {
  for (const auto& [key, value] : group.settings) {
    if (key == name) return &value;
  }
  return nullptr;
}

}  // namespace lowbit::ckpt
