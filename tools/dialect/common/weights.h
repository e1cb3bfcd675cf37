// The weights of a checkpoint by parameter name. They tell shapes that state alone does not.
#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dialect/common/optimizer_tree.h"

namespace lowbit::ckpt {

/// Whether a parameter's name matches one of the patterns, by the rules of Python's fnmatch.
bool name_fits(const std::string& name, const std::vector<std::string>& patterns);

/// Tensors by the end of their name: "a.b" is "model.a.b" rather than "model.x.a.b".
class TensorsByName {
 public:
  /// Adds a leaf if it is a tensor.
  void add(const Leaf& leaf);
  /// The tensor with the shortest name that ends with the parameter's, after a dot; null if none
  /// does.
  const Leaf* find(const std::string& param) const;

 private:
  std::vector<std::pair<std::string, const Leaf*>> named_;
};

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
