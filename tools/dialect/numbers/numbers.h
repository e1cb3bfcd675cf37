// Plain numbers: steps, settings, tensors of one element.
#pragma once

#include <string>
#include <string_view>

#include "dialect/model/model.h"

namespace lowbit::ckpt {

/// The value of a leaf, or the only element of a tensor.
Result<Value> number_of(const Leaf& leaf);
/// The value as a double. A value that is not a number is an error, which names `what`.
Result<double> real_of(const Value& value, const std::string& what);
/// The value as an integer that a double represents exactly; anything else is an error.
Result<int64_t> whole_of(const Value& value, const std::string& what);
/// A count of steps: a whole number that is not negative; anything else is an error.
Result<double> steps_of(const Value& value, const std::string& what);
/// A number of a parameter by name ("step"); null if it has none.
const Value* number_in(const Param& param, std::string_view name);
/// For messages: a number, True, False, None, a text or several of these, much as Python writes
/// them; "another value" for the rest.
std::string value_text(const Value& value);

}  // namespace lowbit::ckpt
