// Where in a document an optimizer's state dict begins.
#pragma once

#include <vector>

#include "container/document.h"

namespace lowbit::ckpt {

struct OptimizerRoot {
  Path path;
  bool groups = false, states = false;
};
/// All places that may be an optimizer state dict.
std::vector<OptimizerRoot> optimizer_roots(const Document& document);
/// A leaf's path as if it had one: where only flat names are known, the part before "state." or
/// "param_groups." is taken for the root.
Path nested_path(const Document& document, const Leaf& leaf);

}  // namespace lowbit::ckpt
