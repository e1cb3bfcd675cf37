// Names of parameters: patterns that match them, and tensors whose names end with them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "container/document/document.h"

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

}  // namespace lowbit::ckpt
