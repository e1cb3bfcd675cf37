// A document's leaves as the tree that their paths tell.
#pragma once

#include <cstddef>
#include <vector>

#include "container/document.h"

namespace lowbit::ckpt {

struct TreeNode {
  enum class Kind : uint8_t { kLeaf, kDict, kList, kTuple };
  Kind kind = Kind::kDict;
  const Leaf* leaf = nullptr;
  const Holder* holder = nullptr;                     // what else is known of it
  std::vector<std::pair<Key, size_t>> children = {};  // numbers of nodes; in order
};

/// Node 0 is the root. An error where paths contradict each other, or a list has holes.
Result<std::vector<TreeNode>> tree_of(const Document& document);

}  // namespace lowbit::ckpt
