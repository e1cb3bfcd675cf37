// torch's dtypes and shapes, as far as bytes are concerned.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/status.h"

namespace lowbit::ckpt {

/// `storage` is the storage class that _rebuild_tensor_v2 names; empty where only UntypedStorage
/// holds it.
struct Dtype {
  const char* name;
  int bytes;
  const char* storage;
};
std::span<const Dtype> all_dtypes();
/// Null where there is none of that name ("float32").
const Dtype* find_dtype(std::string_view name);
/// Null where there is none of that storage class ("FloatStorage").
const Dtype* find_storage(std::string_view storage);

using Shape = std::vector<int64_t>;
/// The product of the sizes, or an error where it is beyond 2^56 or a size is negative.
Result<uint64_t> elements(const Shape& shape, const std::string& what);
/// The product of sizes that were checked.
uint64_t volume(const Shape& shape);
/// Row-major strides, in elements.
Shape row_major(const Shape& shape);
std::string shape_text(const Shape& shape);

}  // namespace lowbit::ckpt
