#include "container/document/tree.h"

#include <algorithm>
#include <map>

#include "io/text.h"

namespace lowbit::ckpt {
namespace {

using Kind = TreeNode::Kind;

Kind kind_for(const Key& key) {
  switch (key.kind) {
    case Key::Kind::kIndex:
      return Kind::kList;
    case Key::Kind::kTupleIndex:
      return Kind::kTuple;
    default:
      return Kind::kDict;
  }
}

class Grower {
 public:
  Status add(const Leaf& leaf) {
    if (leaf.path.size() > Value::kMaxDepth)
      return bad(printable(leaf.name()) + ": lies too deep to be written");
    size_t at = 0;
    for (const Key& key : leaf.path) {
      TreeNode& node = nodes[at];
      const Kind kind = kind_for(key);
      if (node.leaf != nullptr || (!node.children.empty() && node.kind != kind))
        return bad(printable(leaf.name()) + ": another leaf says something else of where it lies");
      node.kind = kind;
      const auto [known, is_new] =
          node_numbers_.try_emplace({at, static_cast<int>(key.kind), key.text()}, nodes.size());
      if (is_new) {
        node.children.emplace_back(key, nodes.size());
        nodes.emplace_back();
      }
      at = known->second;
    }
    if (nodes[at].leaf != nullptr || !nodes[at].children.empty())
      return bad(printable(leaf.name()) + ": two leaves lie at one place");
    nodes[at].leaf = &leaf;
    nodes[at].kind = Kind::kLeaf;
    return fine();
  }

  Status describe(const DictInfo& info) {
    size_t at = 0;
    for (const Key& key : info.path) {
      const auto known = node_numbers_.find({at, static_cast<int>(key.kind), key.text()});
      if (known == node_numbers_.end()) return fine();  // nothing of it is left
      at = known->second;
    }
    nodes[at].info = &info;
    return fine();
  }

  Status finish() {
    for (TreeNode& node : nodes) {
      if (node.kind != Kind::kList && node.kind != Kind::kTuple) continue;
      std::ranges::sort(node.children, [](const auto& a, const auto& b) {
        return a.first.number < b.first.number;
      });
      for (size_t i = 0; i < node.children.size(); ++i) {
        if (node.children[i].first.number != static_cast<int64_t>(i))
          return bad("a list has nothing at place " + std::to_string(i) +
                     ", but something behind it: it cannot be written");
      }
    }
    return fine();
  }

  std::vector<TreeNode> nodes{1};

 private:
  std::map<std::tuple<size_t, int, std::string>, size_t> node_numbers_;  // parent, kind of key, key
};

}  // namespace

Status check_places(const Document& document) {
  Grower grower;
  for (const Leaf& leaf : document.leaves) RETURN_IF_ERROR(grower.add(leaf));
  return fine();
}

Result<std::vector<TreeNode>> tree_of(const Document& document) {
  Grower grower;
  for (const Leaf& leaf : document.leaves) RETURN_IF_ERROR(grower.add(leaf));
  for (const DictInfo& info : document.dicts) RETURN_IF_ERROR(grower.describe(info));
  RETURN_IF_ERROR(grower.finish());
  return std::move(grower.nodes);
}

}  // namespace lowbit::ckpt
