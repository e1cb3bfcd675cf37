// Leaves of an optimizer's state dict that is written: states, numbers, groups.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dialect/model.h"

namespace lowbit::ckpt {

/// Whether a leaf is a tensor of float32 whose values can be read.
bool is_float32(const Leaf& leaf);

/// Where a state of a parameter goes: nested, numbered or flattened as the model was.
Path state_path(const Model& model, const Param& param, const std::string& state);
Leaf value_leaf(Path path, Value value);
Leaf tensor_leaf(Path path, const Dtype* dtype, Shape shape, std::shared_ptr<Source> source);
/// A 0-D float32 or int64 tensor.
Leaf scalar_leaf(Path path, float value);
Leaf scalar_leaf(Path path, int64_t value);
/// Float32 values under another name; where the file has them as such, they stay as they are stored.
Leaf float32_leaf(Path path, const State& state, Shape shape);
/// A torch.Size.
Value size_value(const Shape& shape);
/// The leaves of param_groups; `settings` gives those of a group, without "params".
Status add_groups(const Model& model, const std::function<Result<Settings>(const Group&)>& settings,
                  std::vector<Leaf>& leaves);
/// A document of the model's file that holds no leaves yet.
Document begun(const Model& model);

}  // namespace lowbit::ckpt
