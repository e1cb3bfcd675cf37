// The tree of dicts, lists and tuples that the paths of a document's leaves describe.
#pragma once

#include <cstddef>
#include <vector>

#include "container/document/document.h"

namespace lowbit::ckpt {

/// A leaf, or a dict, list or tuple with children.
struct TreeNode {
  enum class Kind : uint8_t { kLeaf, kDict, kList, kTuple };
  Kind kind = Kind::kDict;
  const Leaf* leaf = nullptr;
  const DictInfo* info = nullptr;                     // what else is known about a dict
  std::vector<std::pair<Key, size_t>> children = {};  // numbers of nodes; in order
};

/// An error where two leaves lie at one place, or one below another.
Status check_places(const Document& document);
/// The nodes of the tree; node 0 is the root. Paths that contradict each other, and lists with
/// missing items, are errors.
Result<std::vector<TreeNode>> tree_of(const Document& document);

}  // namespace lowbit::ckpt
