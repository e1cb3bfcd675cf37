#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "container/common/open.h"
#include "container/document/subclass_cut.h"
#include "dialect/tree/algorithm.h"
#include "io/text.h"
#include "pipeline/commands.h"
#include "pipeline/health.h"
#include "pipeline/role.h"
#include "pipeline/select.h"
#include "pipeline/zero_rank.h"

namespace lowbit::ckpt {
namespace {

/// A value to show; what cannot be JSON is text.
Json shown(const Value& v, int depth) {
  switch (v.kind) {
    case Value::Kind::kNone:
      return nullptr;
    case Value::Kind::kBool:
      return v.integer != 0;
    case Value::Kind::kInt:
      return v.integer;
    case Value::Kind::kFloat:
      return std::isfinite(v.real) ? Json(v.real) : Json(fmt::format("{}", v.real));
    case Value::Kind::kText:
    case Value::Kind::kGlobal:
    case Value::Kind::kDevice:
      return printable(v.text);
    case Value::Kind::kOpaque:
      return v.is_writable() ? fmt::format("<{}>", printable(v.text))
                             : fmt::format("<{}: opaque, not read>", printable(v.text));
    case Value::Kind::kLong:
      return hexadecimal(v);
    case Value::Kind::kComplex:
      return fmt::format("{}{:+}j", v.items[0].real, v.items[1].real);
    case Value::Kind::kBytearray:
    case Value::Kind::kBytes:
      return fmt::format("<{} bytes>", v.text.size());
    case Value::Kind::kDict:
    case Value::Kind::kOrdered: {
      if (depth > 4 || v.items.size() > 256) return fmt::format("<{} entries>", v.items.size() / 2);
      Json dict = Json::object();
      for (size_t i = 0; i + 1 < v.items.size(); i += 2) {
        const Json key = shown(v.items[i], depth + 1);
        dict[key.is_string() ? key.get<std::string>() : key.dump()] =
            shown(v.items[i + 1], depth + 1);
      }
      return dict;
    }
    default: {
      if (depth > 4 || v.items.size() > 256) return fmt::format("<{} items>", v.items.size());
      Json list = Json::array();
      for (const Value& item : v.items) list.push_back(shown(item, depth + 1));
      return list;
    }
  }
}

Json to_json(const Health& h) {
  Json out{{"elements", h.elements}, {"zero", h.zero},           {"nan", h.nan},
           {"infinite", h.infinite}, {"least", h.minimum},       {"most", h.limit},
           {"negative", h.negative}, {"rms", h.root_mean_square}};
  if (h.coded)
    out.update({{"saturated", h.saturated}, {"used", h.used}, {"levels", h.histogram.size()}});
  out["histogram"] = h.histogram;
  // Powers of two are enough for a picture; null is a cell of zeros.
  Json cells = Json::array();
  for (const float c : h.cells)
    cells.push_back(c > 0 ? Json(std::round(std::log2(c) * 10) / 10) : Json(nullptr));
  out["cells"] = {{"rows", h.cell_rows}, {"columns", h.cell_cols}, {"log2", std::move(cells)}};
  return out;
}

void add_entries(Json::object_t&) {}
template <class Entry, class... Rest>
void add_entries(Json::object_t& to, const char* key, Entry&& value, Rest&&... rest) {
  to.emplace_back(key, std::forward<Entry>(value));
  add_entries(to, std::forward<Rest>(rest)...);
}

/// An object of a key, a value, and so on; unlike Json's list of pairs it copies nothing.
template <class... Entries>
Json object_of(Entries&&... entries) {
  Json out = Json::object();
  auto& to = out.get_ref<Json::object_t&>();
  to.reserve(sizeof...(entries) / 2);
  add_entries(to, std::forward<Entries>(entries)...);
  return out;
}

/// Builds an object in linear time; ordered_json searches all keys on each insertion.
class ObjectBuilder {
 public:
  void set(const std::string& key, Json value) {
    auto& entries = object_.get_ref<Json::object_t&>();
    if (known_.insert(key).second) {
      entries.emplace_back(key, std::move(value));
    } else {  // two names that are shown as one
      entries[key] = std::move(value);
    }
  }
  Json take() { return std::move(object_); }

 private:
  Json object_ = Json::object();
  std::unordered_set<std::string> known_;
};

/// What the optimizer's state means: dialect, groups, and each state of each parameter.
Status describe(const Model& model, const InspectOptions& options, Json& out) {
  out["dialect"] = model.dialect;
  const std::string other = other_rule_of(model);
  out["algorithm"] = other.empty() ? model.algorithm : other;
  for (const std::string& w : model.warnings) out["warnings"].push_back(w);
  out["groups"] = Json::array();
  for (const Group& group : model.groups) {
    ObjectBuilder settings;
    for (const auto& [key, value] : group.settings) settings.set(printable(key), shown(value, 0));
    out["groups"].push_back({{"parameters", group.params.size()}, {"settings", settings.take()}});
  }
  uint64_t total = 0, done = 0;
  for (const Param& param : model.params) {
    for (const State& state : param.states) total += volume(state.shape);
  }
  out["states"] = Json::array();
  for (const Param& param : model.params) {
    const std::string name = shown(param);
    for (const State& state : param.states) {
      if (!selected(options.select, names_of(param.name + "." + state.name, state))) continue;
      Json entry =
          object_of("parameter", name, "state", printable(state.name), "shape", state.shape,
                    "stored_as", printable(state.stored_as), "bytes", state.bytes);
      if (options.health) {
        if (state.values != nullptr) {  // not those of a weight's compensation
          ASSIGN_OR_RETURN(health, health_of(state));
          entry["health"] = to_json(health);
        }
        done += volume(state.shape);
        if (!options.progress(done, total)) return interrupted();
      }
      out["states"].push_back(std::move(entry));
    }
  }
  return fine();
}

/// Leaves one by one, and what they come to.
class Totals {
 public:
  explicit Totals(Json& out) : out_(out) {
    out_["tensors"] = Json::array();
    out_["values"] = nullptr;  // its place; see finish
  }

  /// `stored_as`: what the dialect says of the leaf, null where nothing.
  Status add(const Document& document, const Leaf& leaf, const std::string& name,
             const std::string* stored_as) {
    if (leaf.kind == Leaf::Kind::kValue || leaf.kind == Leaf::Kind::kOpaque) {
      const bool plain = leaf.kind == Leaf::Kind::kValue || leaf.value.is_opaque();
      values_.set(printable(name), plain ? shown(leaf.value, 0) : Json("<not plain data>"));
      return fine();
    }
    ASSIGN_OR_RETURN(bytes, kept_bytes(document, leaf));
    // A name tells what a plain tensor is; a quantized one has the same name.
    const bool quantized = is_subclass(leaf);
    std::string kind = quantized ? "quantized" : kind_of(name);
    if (stored_as != nullptr && (quantized || kind == kOther)) kind = "state, " + *stored_as;
    Json entry = object_of("name", printable(name), "shape", leaf.shape, "dtype", leaf.dtype->name,
                           "chunks", leaf.stored == nullptr ? 1 : leaf.stored->chunks.size(),
                           "bytes", bytes, "kind", kind);
    if (!leaf.cls.empty()) entry["class"] = printable(leaf.cls);
    if (stored_as != nullptr) entry["stored_as"] = *stored_as;
    out_["tensors"].push_back(std::move(entry));
    bytes_ += bytes;
    for (auto* sum : {&dtypes_[quantized ? "quantized" : leaf.dtype->name], &kinds_[kind]}) {
      ++sum->first;
      sum->second += bytes;
    }
    if (name.ends_with(".step") && leaf.shape.empty() && leaf.source != nullptr &&
        leaf.dtype->name == std::string("float32")) {
      float step = 0;
      RETURN_IF_ERROR(leaf.source->read(0, 1, &step));
      if (std::isfinite(step)) steps_.insert(step);
    }
    return fine();
  }

  /// Steps that are not tensors of their own.
  void add_steps(const Model& model) {
    for (const Param& param : model.params) {
      const Value* step = setting(param.numbers, "step");
      if (step == nullptr) continue;
      if (step->is(Value::Kind::kInt)) steps_.insert(static_cast<double>(step->integer));
      if (step->is(Value::Kind::kFloat) && std::isfinite(step->real)) steps_.insert(step->real);
    }
  }

  void finish() {
    out_["values"] = values_.take();
    out_["steps"] = steps_;
    for (const auto& [key, sums] :
         {std::pair{"bytes_by_dtype", &dtypes_}, std::pair{"bytes_by_kind", &kinds_}}) {
      out_[key] = Json::object();
      for (const auto& [name, sum] : *sums)
        out_[key][name] = {{"tensors", sum.first}, {"bytes", sum.second}};
    }
    out_["bytes"] = bytes_;
  }

 private:
  static constexpr const char* kOther = "weights and other tensors";
  Json& out_;
  ObjectBuilder values_;
  std::map<std::string, std::pair<uint64_t, uint64_t>> dtypes_, kinds_;  // tensors, bytes
  std::set<double> steps_;
  uint64_t bytes_ = 0;
};

/// Adds a warning for each pattern of `exclude` that fits no leaf and no state.
void warn_of_exclude(const Document& document, const Result<Model>& model,
                     const Selection& selection, Json& out) {
  if (selection.exclude.empty()) return;
  std::vector<std::string> names = leaf_names(document);
  if (model.ok()) {
    for (const Param& param : model.value().params) {
      for (const State& state : param.states) names.push_back(param.name + "." + state.name);
    }
  }
  for (const std::string& w : warn_of_exclude(names, selection)) out["warnings"].push_back(w);
}

}  // namespace

Result<Json> inspect(const std::string& path, const InspectOptions& options) {
  ASSIGN_OR_RETURN(document, open_checkpoint(path));
  RETURN_IF_ERROR(check_selection(document, options.select));
  const Manifest& m = *document.manifest;
  Json out;
  out["path"] = printable(path);
  out["container"] = container_name(m.kind);
  out["facts"] = m.facts;
  out["warnings"] = m.warnings;
  out["files"] = m.file_names.size();
  // What leaves are, by the dialect where it knows them, else by their names.
  std::unordered_map<const Leaf*, std::string> known;
  const auto shared = std::make_shared<const Document>(std::move(document));
  const Status whole = check_no_zero_rank(*shared);
  const auto found = whole.ok() ? recognize(*shared) : Result<Recognized>(whole.error());
  auto model = found.ok() ? found.value().dialect->read(shared, found.value().tree)
                          : Result<Model>(found.error());
  if (model.ok()) {
    RETURN_IF_ERROR(describe(model.value(), options, out));
    for (const Param& param : model.value().params) {
      for (const State& state : param.states) {
        for (const Leaf* leaf : state.leaves) known.emplace(leaf, printable(state.stored_as));
      }
    }
  } else {
    out["dialect"] = nullptr;
    out["algorithm"] = "";
    out["groups"] = out["states"] = Json::array();
    out["facts"].push_back(found.ok() ? std::string(found.value().dialect->name) +
                                            "'s state, but: " + model.error().text
                                      : found.error().text);
  }
  warn_of_exclude(*shared, model, options.select, out);
  Totals totals(out);
  for (const Leaf& leaf : shared->leaves) {
    const std::string name = leaf.name();
    if (!selected(options.select, name)) continue;
    const auto state = known.find(&leaf);
    RETURN_IF_ERROR(
        totals.add(*shared, leaf, name, state == known.end() ? nullptr : &state->second));
  }
  if (model.ok()) totals.add_steps(model.value());
  totals.finish();
  if (options.digest) {
    ASSIGN_OR_RETURN(hex, digest(select(*shared, options.select), options.progress));
    out["digest"] = hex;
  }
  return out;
}

}  // namespace lowbit::ckpt
