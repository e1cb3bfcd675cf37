#include "container/manifest.h"

#include <cstring>

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
    {"uint16", 2, ""},
    {"uint32", 4, ""},
    {"uint64", 8, ""},
    {"float8_e4m3fn", 1, ""},
    {"float8_e5m2", 1, ""},
    {"float8_e4m3fnuz", 1, ""},
    {"float8_e5m2fnuz", 1, ""},
    {"float8_e8m0fnu", 1, ""},
};

}  // namespace

const Dtype* find_dtype(const std::string& name) {
  for (const Dtype& d : kDtypes) {
    if (name == d.name) return &d;
  }
  return nullptr;
}

const Dtype* find_storage(const std::string& storage) {
  for (const Dtype& d : kDtypes) {
    if (!storage.empty() && storage == d.storage) return &d;
  }
  return nullptr;
}

Result<uint64_t> elements(const Shape& shape, const std::string& what) {
  constexpr uint64_t kMost = 1ull << 60;
  uint64_t n = 1;
  bool empty = false;
  for (const int64_t size : shape) {
    if (size < 0) return bad(what + ": has a negative size in " + shape_text(shape));
    empty = empty || size == 0;
    if (size != 0 && n > kMost / static_cast<uint64_t>(size))
      return bad(what + ": " + shape_text(shape) + " has too many elements");
    n *= size == 0 ? 1 : static_cast<uint64_t>(size);
  }
  return empty ? 0 : n;
}

std::string shape_text(const Shape& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) s += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return s + "]";
}

}  // namespace lowbit::ckpt
