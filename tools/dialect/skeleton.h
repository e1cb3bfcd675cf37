// Where an optimizer's state dict lies in a document, whoever's it is: what all dialects share.
// torch has it nested by name or by number, or flattened, under any key or none.
#pragma once

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "dialect/model.h"

namespace lowbit::ckpt {

/// Leaves below state.<key>, by what follows the key ("exp_avg"; keys joined by '.' where it is
/// nested further).
struct Entry {
  std::string key;     // as it is in the file, digits where parameters are numbered
  std::string name;    // the fqn, also of a numbered one where the groups tell it; "" where not
  int64_t index = -1;  // where parameters are numbered
  std::vector<std::pair<std::string, const Leaf*>> leaves = {};
  const Leaf* find(std::string_view leaf) const;
};

struct Skeleton {
  Path root;
  bool flattened = false, numbered = false;
  std::vector<Entry> params;  // in the groups' order
  std::vector<Group> groups;  // tensors of one element as plain numbers
  std::vector<const Leaf*> rest;
  std::vector<std::string> warnings;
};

/// An error (exit code 3) where there is no optimizer state dict, or more than one. The leaves stay
/// the document's.
Result<Skeleton> skeleton_of(const Document& document);
/// Whether there is one at all: for `recognize`.
bool has_skeleton(const Document& document);

/// The only element of a tensor, or the value of a leaf that is one.
Result<Value> number_of(const Leaf& leaf);
/// The value as a double; an error that names `what` where it is no number.
Result<double> real_of(const Value& value, const std::string& what);
/// The value as a whole number that a double holds exactly; an error where it is none.
inline Result<int64_t> whole_of(const Value& value, const std::string& what) {
  LB_TRY(real, real_of(value, what));
  constexpr double kMost = 9007199254740992.0;  // 2^53
  if (!(real >= -kMost && real <= kMost) || real != std::trunc(real))
    return bad(what + ": " + std::to_string(real) + " is no whole number");
  return static_cast<int64_t>(real);
}

/// A model with everything but its parameters' states and shapes: root, groups, names, rest.
Model model_of(const Skeleton& skeleton, const std::string& dialect,
               std::shared_ptr<const Document> document);

// Writing:

/// Where a state of a parameter goes: nested, numbered or flattened as the model was.
Path state_path(const Model& model, const Param& param, const std::string& state);
Leaf value_leaf(Path path, Value value);
Leaf tensor_leaf(Path path, const Dtype* dtype, Shape shape, std::shared_ptr<Source> source);
/// A 0-D float32 or int64 tensor.
Leaf scalar_leaf(Path path, float value);
Leaf scalar_leaf(Path path, int64_t value);
/// The leaves of param_groups; settings[i] are those of model.groups[i], without "params".
void add_groups(const Model& model,
                const std::vector<std::vector<std::pair<std::string, Value>>>& settings,
                std::vector<Leaf>& leaves);
/// The model's name for messages: the fqn or "parameter 3".
std::string shown(const Param& param);

/// A setting by name; null where there is none.
const Value* setting(const Group& group, std::string_view name);

}  // namespace lowbit::ckpt
