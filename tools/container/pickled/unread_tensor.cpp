#include "container/pickled/unread_tensor.h"

#include "container/manifest/dtype.h"
#include "container/pickled/globals.h"
#include "container/pickled/tensor_node.h"
#include "pickle/schema.h"

namespace lowbit::ckpt {
namespace {

constexpr int kMaxDepth = 4;  // of tensors inside tensors, as read_tensor has it

std::string of_node(const Pickle& p, NodeId node, int depth);

std::string of_class(std::string_view cls) {
  if (cls.ends_with(".ShardedTensor"))
    return std::string(kOneRank) + " of a tensor, " + std::string(cls);
  return "a tensor of the class " + std::string(cls);
}

/// _rebuild_from_type_v2(function, type, arguments, state).
std::string of_type(const Pickle& p, NodeId arguments, int depth);

/// The name of the dtype of _rebuild_tensor_v2 and v3: of the storage, or said beside it.
std::string_view dtype_of(const Pickle& p, NodeId arguments, bool v3) {
  const NodeId named = v3 ? p.item(arguments, 6) : p.item(p.item(p.item(arguments, 0), 0), 1);
  const GlobalRule* rule = p.global(named);
  const Dtype* dtype = rule == nullptr ? nullptr
                       : v3            ? find_dtype(rule->name)
                                       : find_storage(rule->name);
  return dtype == nullptr ? "" : dtype->name;
}

/// Whether the last argument of a dense tensor says so as torch does: {"conj": True}, of complex
/// numbers alone, or {"neg": True}.
bool is_view(const Pickle& p, NodeId metadata, std::string_view dtype) {
  const auto items = p.items(metadata);
  bool any = false;
  for (size_t i = 0; i + 1 < items.size(); i += 2) {
    const std::string_view bit = p.is(items[i], ckpt::Kind::kString) ? p.text(items[i]) : "";
    if ((bit != "conj" && bit != "neg") || !p.is(items[i + 1], ckpt::Kind::kBool)) return false;
    const bool set = p.integer(items[i + 1]) != 0;
    if (bit == "conj" && set && !dtype.starts_with("complex")) return false;
    any |= set;
  }
  return any;
}

/// Whether a tuple of sizes is one that a tensor can have.
bool is_possible(const Pickle& p, NodeId sizes) {
  Shape shape;
  if (p.is(sizes, ckpt::Kind::kCall)) sizes = p.item(p.item(sizes, 1), 0);
  if (!p.is(sizes, ckpt::Kind::kTuple) || p.items(sizes).size() > 64) return false;
  for (const NodeId size : p.items(sizes)) {
    if (!p.is(size, ckpt::Kind::kInt) || p.integer(size) < 0) return false;
    shape.push_back(p.integer(size));
  }
  return elements(shape, "").ok();
}

/// The tensor of rule(*arguments).
std::string of_call(const Pickle& p, const GlobalRule& rule, NodeId arguments, int depth) {
  if (depth > kMaxDepth) return "";
  if (const char* kind = refused_kind(rule.name)) {
    const bool meta = rule.name == "_rebuild_meta_tensor_no_storage";
    if (!meta && rule.name != "_rebuild_qtensor") return kind;
    return is_possible(p, p.item(arguments, meta ? 1 : 2)) ? kind : "";
  }
  const bool v3 = rule.name == "_rebuild_tensor_v3";
  if (v3 || rule.name == "_rebuild_tensor_v2") {
    if (!is_possible(p, p.item(arguments, 2))) return "";
    if (v3 && p.is(p.item(arguments, 6), ckpt::Kind::kUnknown))
      return "a tensor of the dtype " + std::string(p.opaque_name(p.item(arguments, 6)));
    const bool view = is_view(p, p.item(arguments, v3 ? 7 : 6), dtype_of(p, arguments, v3));
    return view ? "a conjugated or negated view" : "";
  }
  if (rule.name.starts_with("_rebuild_parameter"))
    return of_node(p, p.item(arguments, 0), depth + 1);
  return rule.name == "_rebuild_from_type_v2" ? of_type(p, arguments, depth) : "";
}

std::string of_type(const Pickle& p, NodeId arguments, int depth) {
  const NodeId function = p.item(arguments, 0), type = p.item(arguments, 1);
  const NodeId inner = p.item(arguments, 2);
  // The class says more than the function that makes it.
  for (const NodeId unknown : {type, function}) {
    if (!p.opaque_name(unknown).empty()) return of_class(p.opaque_name(unknown));
  }
  const GlobalRule& rule = *p.global(function);
  if (rule.arguments == nullptr || !arguments_match(p, inner, rule.arguments)) return "";
  if (rule.name != "_rebuild_wrapper_subclass") return of_call(p, rule, inner, depth + 1);
  if (p.global(type)->name != "DTensor") return "";
  NodeId state = p.item(arguments, 3);
  if (p.is(state, ckpt::Kind::kTuple)) state = p.item(state, 1);
  return p.is(state, ckpt::Kind::kDict) ? of_node(p, p.find(state, "_local_tensor"), depth + 1)
                                        : "";
}

std::string of_node(const Pickle& p, NodeId node, int depth) {
  return is_tensor(p, node) ? of_call(p, *p.global(node), p.item(node, 1), depth) : "";
}

}  // namespace

std::string unread_kind(const Pickle& pickle, NodeId node) { return of_node(pickle, node, 0); }

}  // namespace lowbit::ckpt
