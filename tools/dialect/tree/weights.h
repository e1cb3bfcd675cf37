// The weights of a checkpoint by parameter name. They tell shapes that state alone does not.
#pragma once

#include <string>
#include <unordered_map>

#include "dialect/tree/optimizer_tree.h"

namespace lowbit::ckpt {

/// Tensors by their whole name, or by what follows its first or second dot.
class Weights {
 public:
  /// Adds the leaves outside the optimizer, and those of document.model.
  Weights(const Document& document, const OptimizerTree& tree);
  /// The weight of a parameter; null if there is none, or two of different shapes.
  const Leaf* find(const Entry& entry) const;

 private:
  void add(const Leaf& leaf);
  std::unordered_map<std::string, const Leaf*> by_name_;
};

}  // namespace lowbit::ckpt
