// A parsed pickle: an arena of 16-byte nodes that refer to each other by index, so that deep and
// cyclic inputs are safe to destroy. Text stays in the input. A global is only a row of the
// allowlist; nothing is imported and nothing is called.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lowbit::ckpt {

using NodeId = uint32_t;
constexpr NodeId kNoNode = UINT32_MAX;

enum class Kind : uint8_t {
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kBytes,
  kList,
  kTuple,
  kDict,        // items: key, value, key, value; also an OrderedDict
  kGlobal,      // one of the allowlist
  kCall,        // items: callable, arguments, state or kNoNode
  kObject,      // the same, made by NEWOBJ
  kPersistent,  // items: the id
  kLong,        // text: an integer of more than 64 bits, little-endian in two's complement
  kUnknown,     // a global outside the allowlist, where such may be named: `data` in `unknown`
  kOpaque,      // an object of such a class, whose content is not looked at: the same
  kSet,         // a set as protocol 4 writes it
};

struct Node {
  Kind kind = Kind::kNone;
  uint32_t length = 0;  // text: bytes; tuple: items; list, set, dict: number of its vector, or 0
  uint64_t data = 0;  // the number's bits; text: where in the input; tuple, call: where in `pool`;
                      // dict: 0, or of an OrderedDict 1, or 2 + the node of its attributes,
                      // or of a node of a configuration tree Pickle::kConfiguration
};

/// A row of an allowlist.
struct GlobalRule {
  std::string_view module, name;
  const char* arguments;  // what a call of it takes, in the letters of schema.h; null: no call
  bool object = false;    // NEWOBJ with (), or with `arguments` where they are given, and BUILD
};

class Pickle {
 public:
  Kind kind(NodeId id) const { return nodes[id].kind; }
  bool is(NodeId id, Kind kind) const { return id != kNoNode && nodes[id].kind == kind; }
  int64_t integer(NodeId id) const { return static_cast<int64_t>(nodes[id].data); }
  double real(NodeId id) const { return std::bit_cast<double>(nodes[id].data); }
  std::string_view text(NodeId id) const {
    return std::string_view(bytes).substr(nodes[id].data, nodes[id].length);
  }
  /// The children of a container, call, object or persistent id; empty for any other node.
  std::span<const NodeId> items(NodeId id) const {
    if (id == kNoNode) return {};
    const Node& n = nodes[id];
    switch (n.kind) {
      case Kind::kTuple:
        return std::span(pool).subspan(n.data, n.length);
      case Kind::kCall:
      case Kind::kObject:
        return std::span(pool).subspan(n.data, 3);
      case Kind::kPersistent:
        return std::span(pool).subspan(n.data, 1);
      case Kind::kList:
      case Kind::kSet:
      case Kind::kDict:
        return n.length == 0 ? std::span<const NodeId>() : std::span(lists[n.length - 1]);
      default:
        return {};
    }
  }
  /// Item i of a node, or kNoNode if it has fewer.
  NodeId item(NodeId id, size_t i) const {
    const auto all = items(id);
    return i < all.size() ? all[i] : kNoNode;
  }
  /// Marks a dict that is a yacs CfgNode, whose attributes have no meaning here.
  static constexpr uint64_t kConfiguration = uint64_t{1} << 63;
  bool configuration(NodeId id) const {
    return is(id, Kind::kDict) && nodes[id].data == kConfiguration;
  }
  bool ordered(NodeId id) const {
    return is(id, Kind::kDict) && nodes[id].data != 0 && nodes[id].data != kConfiguration;
  }
  /// The attributes of an OrderedDict (such as `_metadata` of a module's state dict), or kNoNode.
  NodeId attributes(NodeId id) const {
    return ordered(id) && nodes[id].data > 1 ? static_cast<NodeId>(nodes[id].data - 2) : kNoNode;
  }
  /// The global itself, or the one that a call or object names; null for anything else.
  const GlobalRule* global(NodeId id) const {
    if (is(id, Kind::kCall) || is(id, Kind::kObject)) id = item(id, 0);
    return is(id, Kind::kGlobal) ? &rules[nodes[id].data] : nullptr;
  }
  /// The class of an opaque object, or an unknown global ("argparse.Namespace"); empty for others.
  std::string_view opaque_name(NodeId id) const {
    return is(id, Kind::kUnknown) || is(id, Kind::kOpaque) ? unknown[nodes[id].data]
                                                           : std::string_view();
  }
  /// Whether a tensor lies at a node or anywhere below; false where no object may be opaque.
  bool holds_tensor(NodeId id) const { return id < tensors.size() && tensors[id]; }
  /// The value of a string key of a dict, or kNoNode.
  NodeId find(NodeId dict, std::string_view key) const {
    const auto all = items(dict);
    for (size_t i = 0; i + 1 < all.size(); i += 2) {
      if (is(all[i], Kind::kString) && text(all[i]) == key) return all[i + 1];
    }
    return kNoNode;
  }
  /// A string key that a dict has twice. It is an error: readers disagree about which one counts.
  std::optional<std::string_view> repeated_key(NodeId dict) const {
    std::vector<NodeId> nodes;
    const auto all = items(dict);
    for (size_t i = 0; i + 1 < all.size(); i += 2) {
      if (is(all[i], Kind::kString)) nodes.push_back(all[i]);
    }
    // One node first: to compare a long text with itself again and again would take for ever.
    std::ranges::sort(nodes);
    const auto same = std::ranges::adjacent_find(nodes);
    if (same != nodes.end()) return text(*same);
    std::vector<std::string_view> keys;
    keys.reserve(nodes.size());
    for (const NodeId node : nodes) keys.push_back(text(node));
    std::ranges::sort(keys);
    const auto twice = std::ranges::adjacent_find(keys);
    return twice == keys.end() ? std::nullopt : std::optional(*twice);
  }

  /// A number that a dict has twice as a key, of any type: Python takes 1, 1.0 and True for one.
  std::optional<std::string> repeated_number(NodeId dict) const {
    std::vector<int64_t> whole;
    std::vector<double> others;
    const auto all = items(dict);
    for (size_t i = 0; i + 1 < all.size(); i += 2) {
      if (is(all[i], Kind::kInt) || is(all[i], Kind::kBool)) whole.push_back(integer(all[i]));
      if (!is(all[i], Kind::kFloat)) continue;
      const double x = real(all[i]);
      if (x >= -0x1p63 && x < 0x1p63 && x == std::trunc(x)) {
        whole.push_back(static_cast<int64_t>(x));
      } else if (x == x) {  // no NaN equals another
        others.push_back(x);
      }
    }
    std::ranges::sort(whole);
    std::ranges::sort(others);
    const auto same = std::ranges::adjacent_find(whole);
    if (same != whole.end()) return std::to_string(*same);
    const auto twice = std::ranges::adjacent_find(others);
    return twice == others.end() ? std::nullopt : std::optional(std::to_string(*twice));
  }

  std::string bytes;  // the input
  std::span<const GlobalRule> rules;
  std::vector<Node> nodes;
  std::vector<NodeId> pool;
  std::vector<std::vector<NodeId>> lists;
  std::vector<std::string> unknown;  // names of globals outside the allowlist, each once
  std::vector<std::string> notes;    // what is read as something simpler, each once
  bool opaque = false;               // whether unknown classes may be named
  std::vector<bool> tensors;         // by node, where they may: see holds_tensor
  NodeId root = 0;
  int protocol = 0;
};

}  // namespace lowbit::ckpt
