// Where two checkpoints differ: by what they mean where both are understood, else leaf by leaf.
#include <algorithm>
#include <iterator>
#include <map>

#include "container/common/open.h"
#include "container/dcp/recorded.h"
#include "container/document/subclass_cut.h"
#include "dialect/numbers/floats.h"
#include "dialect/tree/algorithm.h"
#include "dialect/tree/number_keys.h"
#include "io/text.h"
#include "pickle/numpy_value.h"
#include "pipeline/commands.h"
#include "pipeline/comparison.h"
#include "pipeline/zero_rank.h"

namespace lowbit::ckpt {
namespace {

using Leaves = std::map<std::string, const Leaf*>;

Leaves leaves_of(const std::vector<Leaf>& leaves) {
  Leaves out;
  for (const Leaf& leaf : leaves) out.emplace(leaf.name(), &leaf);
  return out;
}

/// Two subclasses, or chunks of them, by class, attributes and parts.
Status compare_parts(Comparison& comparison, const std::string& name, const Leaf& a,
                     const Leaf& b) {
  if (a.kind != b.kind || a.cls != b.cls || a.parts.size() != b.parts.size()) {
    comparison.differ(name, "is kept in another way in the second");
    return fine();
  }
  if (a.kind == Leaf::Kind::kTensor) return comparison.bytes(name, a, b);
  if (!(a.attributes == b.attributes)) comparison.differ(name, "has other attributes");
  for (size_t i = 0; i < a.parts.size(); ++i) {
    const std::string part = a.parts[i].name();
    const auto other =
        std::ranges::find_if(b.parts, [&](const Leaf& leaf) { return leaf.name() == part; });
    if (other == b.parts.end()) {
      comparison.differ(name + "." + part, "is only in the first");
    } else {
      RETURN_IF_ERROR(comparison.bytes(name + "." + part, a.parts[i], *other));
    }
  }
  return fine();
}

/// Quantized tensors by what they are kept as: chunk by chunk where both are cut alike, else as
/// wholes.
Status compare_subclasses(Comparison& comparison, const std::string& name, const Document& first,
                          const Leaf& a, const Document& second, const Leaf& b) {
  if (!is_subclass(a) || !is_subclass(b)) {
    comparison.differ(name, "is kept in another way in the second");
    return fine();
  }
  if (!comparison.alike(name, a.shape, b.shape)) return fine();
  const auto cut_alike = [](const Tensor& x, const Tensor& y) {
    return std::ranges::equal(x.chunks, y.chunks, [](const Chunk& p, const Chunk& q) {
      return p.offset == q.offset && p.shape == q.shape;
    });
  };
  if (a.kind == Leaf::Kind::kTensor && b.kind == Leaf::Kind::kTensor &&
      cut_alike(*a.stored, *b.stored)) {
    for (size_t i = 0; i < a.stored->chunks.size(); ++i) {
      ASSIGN_OR_RETURN(x, subclass_chunk(first, a, a.stored->chunks[i]));
      ASSIGN_OR_RETURN(y, subclass_chunk(second, b, b.stored->chunks[i]));
      RETURN_IF_ERROR(
          compare_parts(comparison, a.stored->chunks.size() == 1 ? name : x.name(), x, y));
    }
    return fine();
  }
  const auto x = whole_subclass(first, a), y = whole_subclass(second, b);
  if (x.ok() && y.ok()) return compare_parts(comparison, name, x.value(), y.value());
  comparison.differ(name,
                    "is quantized in other blocks in the second; diff without --bytes "
                    "compares its numbers");
  return fine();
}

/// Pickles of values that are not plain data: what is in them is not looked at, their bytes are.
Status compare_opaque(Comparison& comparison, const std::string& name, const Document& first,
                      const Leaf& a, const Document& second, const Leaf& b) {
  const auto item = [](const Leaf& leaf) { return leaf.blob->extent.length > 0; };
  if (!item(a) || !item(b)) {
    if (!(a.value == b.value)) comparison.differ(name, "is opaque, and of other classes");
    comparison.skip(name);
    return fine();
  }
  ASSIGN_OR_RETURN(x, value_digest(*first.manifest, *a.blob));
  ASSIGN_OR_RETURN(y, value_digest(*second.manifest, *b.blob));
  if (x != y) comparison.differ(name, "is not plain data, and its bytes differ");
  return fine();
}

/// Whether `floats_of` reads the tensor: counters, masks and the like are compared by their bytes.
bool is_floating(const Leaf& leaf) {
  const std::string_view dtype = leaf.dtype->name;
  return dtype == "float32" || dtype == "bfloat16" || dtype == "float16" || dtype == "float64";
}

Status compare_leaf(Comparison& comparison, const std::string& name, const Document& first,
                    const Leaf& a, const Document& second, const Leaf& b, bool by_bytes) {
  if (is_subclass(a) || is_subclass(b))
    return compare_subclasses(comparison, name, first, a, second, b);
  // An array of no dimensions is a number by meaning: safetensors keeps it as one.
  const bool tensor = a.kind == Leaf::Kind::kTensor || b.kind == Leaf::Kind::kTensor;
  if (!by_bytes && !tensor && a.kind != b.kind) {
    const Value x = with_numbers(a.value), y = with_numbers(b.value);
    if (!x.is_opaque() && !y.is_opaque()) {
      comparison.value(name, x, y);
      return fine();
    }
  }
  if (a.kind != b.kind) {
    comparison.differ(name, "is something else in the second");
    return fine();
  }
  if (a.kind == Leaf::Kind::kValue) {
    comparison.value(name, a.value, b.value);
    return fine();
  }
  // Arrays of numpy, whose content is known; else the items of directories say more than names.
  if (a.kind == Leaf::Kind::kOpaque && a.value.is_writable() && b.value.is_writable()) {
    comparison.value(name, a.value, b.value);
    return fine();
  }
  if (a.kind == Leaf::Kind::kOpaque) return compare_opaque(comparison, name, first, a, second, b);
  if (by_bytes || !is_floating(a) || !is_floating(b)) return comparison.bytes(name, a, b);
  if (!comparison.alike(name, a.shape, b.shape)) return fine();
  return comparison.numbers(name, a.shape, *floats_of(a), *floats_of(b));
}

/// What the keys of a dict, or its places, are: "text", ...
std::string_view kind_text(Key::Kind kind, bool holder) {
  switch (kind) {
    case Key::Kind::kName:
      return holder ? "a dict" : "text";
    case Key::Kind::kNumber:
      return holder ? "a dict" : "numbers";
    case Key::Kind::kIndex:
      return "a list";
    default:
      return "a tuple";
  }
}

/// Names of leaves are the same where a key is text in one tree and a number in the other, or a
/// place in a list and in a tuple. Python finds nothing under the wrong one.
void compare_kinds(Comparison& comparison, const Document& first, const Leaves& a,
                   const Document& second, const Leaves& b) {
  const auto tells = [](const Document& document) {
    return document.manifest->has_paths && document.manifest->tells_keys;
  };
  if (!tells(first) || !tells(second)) return;
  std::map<std::string, std::string> found;
  for (const auto& [name, x] : a) {
    const auto other = b.find(name);
    if (other == b.end() || !comparison.wants({name})) continue;
    const Path &p = x->path, &q = other->second->path;
    const bool alike =
        std::ranges::equal(p, q, [](const Key& k, const Key& l) { return k.text() == l.text(); });
    for (size_t i = 0; alike && i < p.size(); ++i) {
      const auto keys = [](Key::Kind kind) {
        return kind == Key::Kind::kName || kind == Key::Kind::kNumber;
      };
      if (p[i].kind == q[i].kind) continue;
      const bool holder = !keys(p[i].kind) || !keys(q[i].kind);
      const std::string where = flat_name(Path(p.begin(), p.begin() + static_cast<long>(i)));
      found.emplace(where.empty() ? "the whole" : where,
                    (holder ? "is " : "has ") + std::string(kind_text(p[i].kind, holder)) +
                        (holder ? " in the first and " : " for keys in the first and ") +
                        std::string(kind_text(q[i].kind, holder)) + " in the second");
    }
  }
  for (auto& [where, what] : found) comparison.differ(where, std::move(what));
}

Status compare_leaves(Comparison& comparison, const Document& first, const std::vector<Leaf>& a,
                      const Document& second, const std::vector<Leaf>& b, bool by_bytes) {
  compare_kinds(comparison, first, leaves_of(a), second, leaves_of(b));
  return pair_up(comparison, leaves_of(a), leaves_of(b),
                 [&](const std::string& name, const Leaf* x, const Leaf* y) {
                   return compare_leaf(comparison, name, first, *x, second, *y, by_bytes);
                 });
}

/// What pairs a parameter: its name where both have names, else its number.
std::string key_of(const Model& model, size_t i, bool by_name) {
  const Param& p = model.params[i];
  return by_name ? p.name
                 : "parameter " + std::to_string(p.index < 0 ? static_cast<int64_t>(i) : p.index);
}

std::map<std::string, const Param*> params_of(const Model& model, bool by_name) {
  std::map<std::string, const Param*> out;
  for (size_t i = 0; i < model.params.size(); ++i)
    out.emplace(key_of(model, i, by_name), &model.params[i]);
  return out;
}

bool has_names(const Model& model) {
  return std::ranges::none_of(model.params, [](const Param& p) { return p.name.empty(); });
}

/// The tensors of a state whose numbers are not known, by lowbit's keys: the compensation of a
/// weight, or codes of a shape that the file does not tell.
std::map<std::string, const Leaf*> tensors_of(const State& state) {
  if (state.raw) return {{state.name, &*state.raw}};
  std::map<std::string, const Leaf*> out;
  for (const auto& [key, leaf] : state.own) out.emplace(key, &leaf);
  if (out.empty() && state.leaves.size() == 1) out.emplace(state.name, state.leaves[0]);
  return out;
}

Status compare_tensors(Comparison& comparison, const std::string& name, const State& a,
                       const State& b) {
  const auto x = tensors_of(a), y = tensors_of(b);
  const bool alike =
      std::ranges::equal(x, y, [](const auto& p, const auto& q) { return p.first == q.first; });
  if (!alike || x.empty()) {
    comparison.differ(name, "is " + a.stored_as + " in the first and " + b.stored_as +
                                " in the second, and the numbers of one of them are not known");
    return fine();
  }
  const std::string param = name.substr(0, name.size() - a.name.size());
  for (const auto& [key, leaf] : x)
    RETURN_IF_ERROR(comparison.bytes(param + key, *leaf, *y.at(key)));
  return fine();
}

/// Where a file knows only a matrix, not the parameter's shape, as many values are compared.
Status compare_states(Comparison& comparison, const std::string& name, const State& a,
                      const State& b, bool known_shapes) {
  if (a.values == nullptr || b.values == nullptr) return compare_tensors(comparison, name, a, b);
  if (known_shapes ? a.shape == b.shape : volume(a.shape) == volume(b.shape))
    return comparison.numbers(name, a.shape, *a.values, *b.values);
  comparison.alike(name, a.shape, b.shape);
  return fine();
}

std::map<std::string, const State*> states_of(const std::string& name, const Param& param) {
  std::map<std::string, const State*> out;
  for (const State& state : param.states) out.emplace(name + "." + state.name, &state);
  return out;
}

/// Settings of a group, numbers of a parameter, by key. What one of two files of one dialect lacks
/// is a difference, but for options that are off, or as `usual`: other versions do not have them.
void compare_values(Comparison& comparison, const std::string& name, const Settings& a,
                    const Settings& b, bool one_dialect, const Settings& usual = {}) {
  const auto lacks = [&](const std::string& key, const Value& value, const char* what) {
    const Value* known = value.is(Value::Kind::kBool) ? setting(usual, key) : nullptr;
    const bool off = value.is(Value::Kind::kNone) ||
                     (value.is(Value::Kind::kBool) && value.integer == 0) ||
                     (known != nullptr && *known == value);
    if (one_dialect && !off && comparison.wants({name + "." + key}))
      comparison.differ(name + "." + key, what);
  };
  for (const auto& [key, value] : a) {
    const Value* second = setting(b, key);
    if (second != nullptr) {
      comparison.value(name + "." + key, value, *second);
    } else {
      lacks(key, value, "is only in the first");
    }
  }
  for (const auto& [key, value] : b) {
    if (setting(a, key) == nullptr) lacks(key, value, "is only in the second");
  }
}

Status compare_params(Comparison& comparison, const Model& a, const Model& b) {
  const bool by_name = has_names(a) && has_names(b);
  return pair_up(
      comparison, params_of(a, by_name), params_of(b, by_name),
      [&](const std::string& name, const Param* x, const Param* y) -> Status {
        RETURN_IF_ERROR(pair_up(comparison, states_of(name, *x), states_of(name, *y),
                                [&](const std::string& which, const State* p, const State* q) {
                                  return compare_states(comparison, which, *p, *q,
                                                        x->known_shape && y->known_shape);
                                }));
        compare_values(comparison, name, x->numbers, y->numbers, a.dialect == b.dialect);
        return fine();
      });
}

/// The parameters of a group. Where both have numbers, their order counts too: by that torch loads
/// the state, whatever `param_names` says.
void compare_members(Comparison& comparison, const std::string& name, const Model& a, size_t group,
                     const Model& b, bool by_name) {
  const auto members = [&](const Model& model) {
    std::vector<std::string> out;
    for (const size_t p : model.groups[group].params) out.push_back(key_of(model, p, by_name));
    return out;
  };
  const auto numbered = [](const Model& model) {
    return std::ranges::none_of(model.params, [](const Param& p) { return p.index < 0; });
  };
  const std::vector<std::string> in_a = members(a), in_b = members(b);
  if (!comparison.wants({name}) || in_a == in_b) return;
  std::vector<std::string> x = in_a, y = in_b, first, second;
  std::ranges::sort(x);
  std::ranges::sort(y);
  std::ranges::set_difference(x, y, std::back_inserter(first));
  std::ranges::set_difference(y, x, std::back_inserter(second));
  if (!first.empty() || !second.empty())
    return comparison.differ(name,
                             "holds other parameters in the second" +
                                 (first.empty() ? "" : ", and there not " + some_of(first)) +
                                 (second.empty() ? "" : ", and only there " + some_of(second)));
  if (!numbered(a) || !numbered(b)) return;
  const auto at = std::mismatch(in_a.begin(), in_a.end(), in_b.begin());
  comparison.differ(name, "are in another order, by which torch loads the state: at place " +
                              std::to_string(at.first - in_a.begin()) + " is " +
                              printable(*at.first) + " in the first and " + printable(*at.second) +
                              " in the second");
}

/// Settings that are tensors of several elements. As of others, what one of two dialects lacks is
/// no difference.
Status compare_arrays(Comparison& comparison, const std::string& name, const Document& first,
                      const Group& a, const Document& second, const Group& b, bool one_dialect) {
  const auto arrays = [&](const Group& group, const Group& other) {
    Leaves out;
    for (const auto& [path, leaf] : group.arrays) {
      const bool both = std::ranges::any_of(
          other.arrays, [&, &way = path](const auto& array) { return array.first == way; });
      if (one_dialect || both) out.emplace(name + "." + flat_name(path), leaf);
    }
    return out;
  };
  return pair_up(comparison, arrays(a, b), arrays(b, a),
                 [&](const std::string& which, const Leaf* x, const Leaf* y) {
                   return compare_leaf(comparison, which, first, *x, second, *y, false);
                 });
}

/// Each dialect has some settings of its own. Names that paired the parameters are not settings:
/// one of two files may have them as the keys of its state.
Status compare_groups(Comparison& comparison, const Model& a, const Model& b) {
  const bool by_name = has_names(a) && has_names(b);
  const auto settings = [&](const Model& model, size_t g) {
    Settings out = model.groups[g].settings;
    if (by_name) std::erase_if(out, [](const auto& s) { return s.first == "param_names"; });
    return out;
  };
  if (a.groups.size() != b.groups.size() && comparison.wants({"param_groups"})) {
    comparison.differ("param_groups", "are not as many in the second");
    return fine();
  }
  const bool one_dialect = a.dialect == b.dialect;
  for (size_t g = 0; g < std::min(a.groups.size(), b.groups.size()); ++g) {
    const std::string name = "param_groups." + std::to_string(g);
    compare_members(comparison, name + ".params", a, g, b, by_name);
    compare_values(comparison, name, settings(a, g), settings(b, g), one_dialect,
                   torch_settings(a.algorithm));
    RETURN_IF_ERROR(compare_arrays(comparison, name, *a.document, a.groups[g], *b.document,
                                   b.groups[g], one_dialect));
  }
  return fine();
}

Result<Model> model_of(const std::shared_ptr<const Document>& document) {
  ASSIGN_OR_RETURN(found, recognize(*document));
  return found.dialect->read(document, found.tree);
}

/// State under text where its optimizer looks for numbers: the same leaves, of which it loads none.
void compare_keys(Comparison& comparison, const Document& a, const Document& b) {
  const auto lost = [](const Document& document) {
    if (document.manifest->kind == ContainerKind::kDcp) return false;
    Document copy = document;
    return restore_number_keys(copy) > 0;
  };
  const bool first = lost(a), second = lost(b);
  if (first != second && comparison.wants({"state"}))
    comparison.differ("state", std::string("has text for keys in the ") +
                                   (first ? "first" : "second") +
                                   ", where its optimizer looks for numbers and finds nothing; "
                                   "convert writes numbers");
}

uint64_t data_bytes(const Document& document) {
  uint64_t bytes = 0;
  for (const Leaf& leaf : document.leaves) {
    if (leaf.kind == Leaf::Kind::kTensor) bytes += leaf.bytes();
  }
  return bytes;
}

/// A checkpoint, and the weights that its dialect may ask for shapes.
Result<std::shared_ptr<const Document>> opened(const std::string& path,
                                               const std::shared_ptr<const Document>& weights) {
  ASSIGN_OR_RETURN(document, open_checkpoint(path));
  document.model = weights;
  return std::make_shared<const Document>(std::move(document));
}

/// The error of a checkpoint whose state cannot be read, though --model is there.
Error unread(Error error, const std::string& path) {
  error.text += "; without --model, tensors are compared one by one";
  return error.after(printable(path) + ": ");
}

Status check(const DiffOptions& options) {
  if (options.bytes && options.tolerance > 0)
    return usage(
        "--tolerance is about numbers, and --bytes compares bytes; leave one of the two out");
  if (options.bytes && !options.model.empty())
    return usage(
        "--model tells what numbers there are, and --bytes compares bytes; leave one of the two "
        "out");
  return fine();
}

}  // namespace

Result<Json> diff(const std::string& first, const std::string& second, const DiffOptions& options) {
  RETURN_IF_ERROR(check(options));
  ASSIGN_OR_RETURN(weights, open_weights(options.model));
  ASSIGN_OR_RETURN(a, opened(first, weights));
  ASSIGN_OR_RETURN(b, opened(second, weights));
  Comparison comparison(options, std::max(data_bytes(*a), data_bytes(*b)));
  Json out{{"first", printable(first)},
           {"second", printable(second)},
           {"by", "bytes"},
           {"dialects", nullptr}};
  auto x = options.bytes ? Result<Model>(bad("")) : model_of(a);
  auto y = options.bytes ? Result<Model>(bad("")) : model_of(b);
  if (weights != nullptr && !x.ok()) return unread(x.error(), first);
  if (weights != nullptr && !y.ok()) return unread(y.error(), second);
  if (x.ok() && y.ok()) {
    out["by"] = "meaning";
    out["dialects"] = {x.value().dialect, y.value().dialect};
    RETURN_IF_ERROR(compare_params(comparison, x.value(), y.value()));
    RETURN_IF_ERROR(compare_groups(comparison, x.value(), y.value()));
    compare_keys(comparison, *a, *b);
    RETURN_IF_ERROR(compare_leaves(comparison, *a, x.value().rest, *b, y.value().rest, false));
  } else {
    if (!options.bytes) out["by"] = "leaves";
    RETURN_IF_ERROR(compare_leaves(comparison, *a, a->leaves, *b, b->leaves, options.bytes));
  }
  RETURN_IF_ERROR(comparison.check_patterns());
  if (comparison.nothing_wanted() && !(a->leaves.empty() && b->leaves.empty()))
    return usage("nothing of " + printable(first) + " and " + printable(second) + " is selected");
  RETURN_IF_ERROR(a->finish());
  RETURN_IF_ERROR(b->finish());
  if (weights != nullptr) RETURN_IF_ERROR(weights->finish());
  out["warnings"] = comparison.warnings();
  out["opaque"] = comparison.skipped();
  out["differences"] = comparison.take();
  out["same"] = out["differences"].empty();
  return out;
}

}  // namespace lowbit::ckpt
