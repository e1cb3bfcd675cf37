// torch's dtypes, and shapes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/status.h"

namespace lowbit::ckpt {

/// A dtype. `storage` is its storage class in _rebuild_tensor_v2; empty if it has only
/// UntypedStorage.
struct Dtype {
  const char* name;
  int bytes;
  const char* storage;
};
std::span<const Dtype> all_dtypes();
/// The dtype of that name ("float32"); null if there is none.
const Dtype* find_dtype(std::string_view name);
/// The dtype of that storage class ("FloatStorage"); null if there is none.
const Dtype* find_storage(std::string_view storage);

using Shape = std::vector<int64_t>;
/// The product of the sizes; an error if it exceeds 2^56 or a size is negative.
Result<uint64_t> elements(const Shape& shape, const std::string& what);
/// The product of sizes that are known to be valid.
uint64_t volume(const Shape& shape);
/// Row-major strides, in elements.
Shape row_major(const Shape& shape);
/// Whether elements with these strides lie row-major; strides of dimensions of one do not count.
bool is_row_major(const Shape& shape, const Shape& stride);
/// The place of an element in memory: its index along each dimension times that one's stride.
uint64_t position(const Shape& at, const Shape& stride);
/// The indices of an element by its row-major number.
Shape index_of(const Shape& shape, uint64_t element);
std::string shape_text(const Shape& shape);

}  // namespace lowbit::ckpt
