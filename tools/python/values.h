// What was read, as Python has it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "container/document/document.h"
#include "dialect/model/model.h"
#include "python/object.h"

namespace lowbit::ckpt::python {

Object to_python(const Path& path);
Object to_python(const Shape& shape);
/// A plain value: dtypes and devices are text, torch.Size is a tuple.
Object to_python(const Value& value);
/// {"dialect", "algorithm", "root", "flattened", "warnings", "refusal", "params", "groups"}; see
/// lowbit/checkpoint/checkpoint.py.
Object to_python(const Model& model);

using OwnTensors = std::vector<std::pair<std::string, const Leaf*>>;
/// The tensors that lowbit takes a state over by, in the order of "own": what lies in the file as
/// lowbit has it, or what a dialect made so.
OwnTensors own_tensors(const State& state);

}  // namespace lowbit::ckpt::python
