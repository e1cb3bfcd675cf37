// Finds where an optimizer's state dict begins in a document.
#pragma once

#include <vector>

#include "container/document/document.h"

namespace lowbit::ckpt {

/// A path that has `param_groups`, `state` or both below it.
struct OptimizerRoot {
  Path path;
  bool groups = false, states = false;
  bool offload = false;  // of torchao's CPUOffloadOptimizer: tree/cpu_offload.h
};
/// Tells the first `length` keys of a path from those of others.
std::string id_of(const Path& path, size_t length);
/// All paths at which an optimizer's state dict may begin.
std::vector<OptimizerRoot> optimizer_roots(const Document& document);
/// Paths that look like an optimizer's state, but have no groups, where others have them.
std::vector<OptimizerRoot> other_roots(const Document& document);
/// The path of a leaf. If only flat names are known, the part before "state." or "param_groups." is
/// the root.
Path nested_path(const Document& document, const Leaf& leaf);

}  // namespace lowbit::ckpt
