// Plain numbers of a checkpoint: steps, settings, tensors of one element.
#pragma once

#include <string>
#include <string_view>

#include "dialect/model.h"

namespace lowbit::ckpt {

/// The only element of a tensor, or the value of a leaf that is one.
Result<Value> number_of(const Leaf& leaf);
/// The value as a double; an error that names `what` where it is no number.
Result<double> real_of(const Value& value, const std::string& what);
/// The value as a whole number that a double holds exactly; an error where it is none.
Result<int64_t> whole_of(const Value& value, const std::string& what);
/// A number of a parameter by name ("step"); null where it has none.
const Value* number_in(const Param& param, std::string_view name);

}  // namespace lowbit::ckpt
