#include "container/manifest/dtype.h"

#include <algorithm>
#include <numeric>

namespace lowbit::ckpt {
namespace {

constexpr Dtype kDtypes[] = {
    {"float32", 4, "FloatStorage"},
    {"float64", 8, "DoubleStorage"},
    {"float16", 2, "HalfStorage"},
    {"bfloat16", 2, "BFloat16Storage"},
    {"uint8", 1, "ByteStorage"},
    {"int8", 1, "CharStorage"},
    {"int16", 2, "ShortStorage"},
    {"int32", 4, "IntStorage"},
    {"int64", 8, "LongStorage"},
    {"bool", 1, "BoolStorage"},
    {"complex64", 8, "ComplexFloatStorage"},
    {"complex128", 16, "ComplexDoubleStorage"},
    {"complex32", 4, ""},
    {"uint16", 2, ""},
    {"uint32", 4, ""},
    {"uint64", 8, ""},
    {"float8_e4m3fn", 1, ""},
    {"float8_e5m2", 1, ""},
    {"float8_e4m3fnuz", 1, ""},
    {"float8_e5m2fnuz", 1, ""},
    {"float8_e8m0fnu", 1, ""},
    {"float4_e2m1fn_x2", 1, ""},
};

}  // namespace

std::span<const Dtype> all_dtypes() { return kDtypes; }

const Dtype* find_dtype(std::string_view name) {
  for (const Dtype& d : kDtypes) {
    if (name == d.name) return &d;
  }
  return nullptr;
}

const Dtype* find_storage(std::string_view storage) {
  for (const Dtype& d : kDtypes) {
    if (!storage.empty() && storage == d.storage) return &d;
  }
  return nullptr;
}

Result<uint64_t> elements(const Shape& shape, const std::string& what) {
  constexpr uint64_t kMax = 1ull << 56;  // times 16 bytes still fits 63 bits
  uint64_t n = 1;
  bool empty = false;
  for (const int64_t size : shape) {
    if (size < 0) return bad(what + ": has a negative size in " + shape_text(shape));
    empty = empty || size == 0;
    // Sizes beside a 0 are held to the limit too: strides are computed from them.
    if (size > 0 && n > kMax / static_cast<uint64_t>(size))
      return bad(what + ": " + shape_text(shape) + " has too many elements");
    n *= static_cast<uint64_t>(std::max<int64_t>(size, 1));
  }
  return empty ? 0 : n;
}

uint64_t volume(const Shape& shape) {
  uint64_t n = 1;
  for (const int64_t size : shape) n *= static_cast<uint64_t>(size);
  return n;
}

Shape row_major(const Shape& shape) {
  Shape stride(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;)
    stride[i - 1] = stride[i] * std::max<int64_t>(shape[i], 1);
  return stride;
}

bool is_row_major(const Shape& shape, const Shape& stride) {
  const Shape dense = row_major(shape);
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] > 1 && stride[d] != dense[d]) return false;
  }
  return true;
}

uint64_t position(const Shape& at, const Shape& stride) {
  return static_cast<uint64_t>(
      std::inner_product(at.begin(), at.end(), stride.begin(), int64_t{0}));
}

Shape index_of(const Shape& shape, uint64_t element) {
  Shape at;
  for (const int64_t stride : row_major(shape)) {
    at.push_back(static_cast<int64_t>(element / static_cast<uint64_t>(stride)));
    element %= static_cast<uint64_t>(stride);
  }
  return at;
}

std::string shape_text(const Shape& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) s += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return s + "]";
}

}  // namespace lowbit::ckpt
