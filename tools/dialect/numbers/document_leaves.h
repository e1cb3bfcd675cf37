// Makes the leaves of an optimizer's state dict: states, numbers, groups.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dialect/model/model.h"

namespace lowbit::ckpt {

/// Whether a leaf is a float32 tensor with readable values.
bool is_float32(const Leaf& leaf);

/// Whether a state is a float64 tensor of the file, which float32 would round.
bool is_float64(const State& state);

/// The path of a state: nested, numbered or flattened, as the model was.
Path state_path(const Model& model, const Param& param, const std::string& state);
Leaf value_leaf(Path path, Value value);
Leaf tensor_leaf(Path path, const Dtype* dtype, Shape shape, std::shared_ptr<Source> source);
/// A 0-D float32 or int64 tensor.
Leaf scalar_leaf(Path path, float value);
Leaf scalar_leaf(Path path, int64_t value);
/// The float32 leaf of a state. Values that the file stores in float32 are copied as they are.
Leaf float32_leaf(Path path, const State& state, Shape shape);
/// A torch.Size.
Value size_value(const Shape& shape);
/// Adds the leaves of param_groups. `settings` returns the settings of a group, without "params".
Status add_groups(const Model& model, const std::function<Result<Settings>(const Group&)>& settings,
                  std::vector<Leaf>& leaves);
/// A document without leaves, from the same file as the model.
Document begun(const Model& model);

}  // namespace lowbit::ckpt
