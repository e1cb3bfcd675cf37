// The weights in a checkpoint, by their parameters: they tell a shape that state alone does not.
#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dialect/skeleton.h"

namespace lowbit::ckpt {

/// A parameter's name without what wrappers put into it (lowbit.overrides.clean_name).
std::string clean_name(const std::string& name);

/// Whether a parameter's name fits one of the patterns, as Python's fnmatch has them.
bool name_fits(const std::string& name, const std::vector<std::string>& patterns);

/// Tensors by the end of their name: of "model.a.b" and "model.x.a.b" the first is a.b's.
class TensorsByName {
 public:
  /// Passed over where it is no tensor.
  void add(const Leaf& leaf);
  /// The shortest name that ends with the parameter's at a dot; null where there is none.
  const Leaf* find(const std::string& param) const;

 private:
  std::vector<std::pair<std::string, const Leaf*>> named_;
};

/// The same by whole names, or what follows their first or second dot.
class Weights {
 public:
  /// Those among the leaves that are no optimizer's, and in document.model.
  Weights(const Document& document, const Skeleton& skeleton);
  /// Null where there is none of that name, or two of different shapes.
  const Leaf* find(const Entry& entry) const;

 private:
  void add(const Leaf& leaf);
  std::unordered_map<std::string, const Leaf*> by_name_;
};

}  // namespace lowbit::ckpt
