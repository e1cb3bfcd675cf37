// Where an optimizer's state dict lies in a document, whoever's it is: what all dialects share.
// torch has it nested by name or by number, or flattened, under any key or none.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "dialect/model/model.h"

namespace lowbit::ckpt {

/// Leaves below state.<key>, by what follows the key ("exp_avg"; keys joined by '.' where it is
/// nested further).
struct Entry {
  std::string key;     // as it is in the file, digits where parameters are numbered
  std::string name;    // the fqn, also of a numbered one where the groups tell it; "" where not
  int64_t index = -1;  // where parameters are numbered
  std::vector<std::pair<std::string, const Leaf*>> leaves = {};
  std::optional<Shape> told = {};  // the parameter's shape, by who reads the file
  const Leaf* find(std::string_view leaf) const;
};

struct OptimizerTree {
  Path root;
  bool flattened = false, numbered = false;
  std::vector<Entry> params;  // in the groups' order
  std::vector<Group> groups;  // tensors of one element as plain numbers
  std::vector<const Leaf*> rest;
  std::vector<const Leaf*> weights;  // of params, where document.model names them by its order
  std::vector<std::string> warnings;
  std::vector<std::string> unresolved = {};
  /// Parameters at the end of `params`, each smaller than those before it: torchao's
  /// CPUOffloadOptimizer keeps such apart, without their places in the model.
  size_t on_device = 0;
  /// Has the leaves of `params` where the document lays them out in another way than torch.
  std::shared_ptr<const Document> view = {};
  /// Leaves of `params` that are arrays of numpy in the document, as their numbers.
  std::vector<std::shared_ptr<const Leaf>> numbers = {};
};

/// An error (exit code 3) where there is no optimizer state dict, or more than one, or where
/// document.model does not tell the names of parameters that are only numbered. The leaves stay the
/// document's, but for `numbers`.
Result<OptimizerTree> optimizer_tree_of(const Document& document);
/// Whether there is one at all: for `recognize`.
bool has_optimizer_tree(const Document& document);

/// A model with everything but its parameters' states and shapes: root, groups, names, rest.
Model model_of(const OptimizerTree& tree, const std::string& dialect,
               std::shared_ptr<const Document> document);

/// The name for messages: the fqn or "parameter 3".
std::string shown(const Param& param);
std::string shown(const Entry& entry);

/// A setting by name; null where there is none.
const Value* setting(const Group& group, std::string_view name);
/// Whether a group has a setting of that name that is True, or a number that is not 0.
bool is_on(const Group& group, std::string_view name);

}  // namespace lowbit::ckpt
