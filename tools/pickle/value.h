// What a pickle says, as inert data: an arena of nodes that refer to each other by index, so that
// deep and cyclic inputs cost nothing to drop. A Global is only its name; nothing is looked up and
// nothing is called.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lowbit::ckpt {

using NodeId = uint32_t;

enum class Kind : uint8_t {
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kBytes,
  kList,
  kTuple,       // items
  kDict,        // items: key, value, key, value
  kGlobal,      // text: "module name"
  kCall,        // items: callable, arguments
  kObject,      // items: class, arguments, and the state where one was set
  kPersistent,  // items: the id
};

struct Node {
  Kind kind = Kind::kNone;
  int64_t integer = 0;    // kBool, kInt
  double real = 0;        // kFloat
  std::string text = {};  // kString, kBytes, kGlobal
  std::vector<NodeId> items = {};
};

class Pickle {
 public:
  const Node& operator[](NodeId id) const { return nodes[id]; }
  /// The value of a string key of a dict, or null.
  const Node* find(const Node& dict, const std::string& key) const {
    for (size_t i = 0; i + 1 < dict.items.size(); i += 2) {
      const Node& k = nodes[dict.items[i]];
      if (k.kind == Kind::kString && k.text == key) return &nodes[dict.items[i + 1]];
    }
    return nullptr;
  }
  /// Item i of a node, or None where it has fewer.
  const Node& item(const Node& node, size_t i) const {
    return i < node.items.size() ? nodes[node.items[i]] : none;
  }

  std::vector<Node> nodes;
  NodeId root = 0;
  Node none;
};

}  // namespace lowbit::ckpt
