// Arrays and numbers of numpy in pickles, such as np.random.get_state() has.
#pragma once

#include <optional>
#include <string>

#include "pickle/plain.h"

namespace lowbit::ckpt {

/// An array as its pickle lays it out; its content is not looked at yet.
struct NumpyArray {
  std::string module;  // of _reconstruct: numpy 1 and 2 call it differently
  std::string code;    // of the dtype: "u4"
  std::vector<int64_t> shape;
  bool columns = false;  // column-major
  NodeId content = kNoNode;
  uint64_t bytes = 0;  // that the content must have
};

/// The array at a node; none where it is not an array, or one of anything but plain numbers in this
/// machine's byte order.
std::optional<NumpyArray> numpy_array(const Pickle& pickle, NodeId node);

/// An opaque value called `name` that keeps an array, so that it can be written again.
Value array_value(const NumpyArray& array, std::string name, std::string content);
/// Writes such a value as numpy pickles it.
void write_array(PickleWriter& to, const Value& value);
/// Writes the dtype of a code.
void write_dtype(PickleWriter& to, const std::string& code);

/// The bytes of an element by the code of its dtype; 0 where it is not a plain number.
uint64_t numpy_width(std::string_view code);

/// The dtype of a code: "float64" of "f8"; "" where it is not a plain number.
std::string numpy_dtype(const std::string& code);
/// A text of numpy ("U3") or bytes of numpy ("S3") as Python's; none where it is not text, or
/// not of that length.
Value numpy_text(const std::string& code, const std::string& bytes);
/// A number of a dtype ("float64", "bool", "complex64") as Python's; none where the bytes are of
/// another one.
Value numpy_number(const std::string& dtype, const std::string& bytes);
/// A value with its arrays of no dimensions, such as np.array(0.1), as the numbers that they hold.
/// It is for settings, which optimizers compute with; elsewhere such an array stays one.
Value with_numbers(Value value);

}  // namespace lowbit::ckpt
