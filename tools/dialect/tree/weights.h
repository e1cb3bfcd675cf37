// The weights of a checkpoint by parameter name.
#pragma once

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "dialect/tree/optimizer_tree.h"

namespace lowbit::ckpt {

/// What leaves have in common that view the same elements of one tensor in memory, as tied weights
/// do. Only the files of torch.save tell; "" where nothing does.
std::string memory_of(const Leaf& leaf);

/// Tensors by the end of their name.
class TensorsByName {
 public:
  /// Adds a leaf if it is a tensor.
  void add(const Leaf& leaf);
  /// The tensors whose name is the parameter's or ends with it after a dot, in the order in which
  /// they were added. "model.a.b" hides "model.x.a.b", as "a.b" hides both: the names of an
  /// optimizer begin where those of its model do.
  std::vector<const Leaf*> find(const std::string& param) const;

 private:
  std::vector<const Leaf*> leaves_;
  std::multimap<std::string, size_t> by_end_;  // by the name without wrappers, read backwards
};

/// The weights of an optimizer's parameters. A checkpoint may hold several sets of them, such as
/// those of a model and their averages, and does not say which the optimizer steps.
class Weights {
 public:
  /// What is asked of a weight: where all that may be the parameter's have it in common, any is as
  /// good.
  enum class Asked : uint8_t { kValues, kShape, kDtype };

  /// Those outside the optimizer and, where these do not tell, those of document.model.
  Weights(const Document& document, const OptimizerTree& tree);
  explicit Weights(const Model& model);
  /// Only these leaves.
  explicit Weights(const std::vector<const Leaf*>& leaves);
  /// The weight of a parameter; null if there is none. An error that names all that may be it, and
  /// says what settles it, where they differ in what is asked.
  Result<const Leaf*> find(const std::string& param, Asked asked) const;
  /// The same, of document.model alone.
  Result<const Leaf*> find_in_model(const std::string& param, Asked asked) const;

 private:
  void add_model(const Document* model);
  Error several(const std::string& param, const std::vector<const Leaf*>& found,
                bool of_model) const;

  bool takes_model_ = true;
  TensorsByName own_, model_;
  std::unordered_map<std::string, const Leaf*> by_order_;  // of the model, see name_by_model
};

}  // namespace lowbit::ckpt
