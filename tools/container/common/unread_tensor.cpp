#include "container/common/unread_tensor.h"

#include "container/common/globals.h"
#include "container/common/tensor_node.h"
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

/// The tensor of rule(*arguments).
std::string of_call(const Pickle& p, const GlobalRule& rule, NodeId arguments, int depth) {
  if (depth > kMaxDepth) return "";
  if (const char* kind = refused_kind(rule.name)) return kind;
  const bool v3 = rule.name == "_rebuild_tensor_v3";
  if (v3 || rule.name == "_rebuild_tensor_v2") {
    if (v3 && p.is(p.item(arguments, 6), ckpt::Kind::kUnknown))
      return "a tensor of the dtype " + std::string(p.opaque_name(p.item(arguments, 6)));
    return p.items(p.item(arguments, v3 ? 7 : 6)).empty() ? "" : "a conjugated or negated view";
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
  return p.is(state, ckpt::Kind::kDict) ? of_node(p, p.find(state, "_local_tensor"), depth + 1) : "";
}

std::string of_node(const Pickle& p, NodeId node, int depth) {
  return is_tensor(p, node) ? of_call(p, *p.global(node), p.item(node, 1), depth) : "";
}

}  // namespace

std::string unread_kind(const Pickle& pickle, NodeId node) { return of_node(pickle, node, 0); }

}  // namespace lowbit::ckpt
