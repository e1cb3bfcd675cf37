// The header of a safetensors file, and lowbit's convention for paths and values in its
// `__metadata__`.
#pragma once

#include <string>
#include <vector>

#include "container/document/document.h"
#include "container/manifest/dtype.h"

namespace lowbit::ckpt {

constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;
constexpr uint64_t kMaxValues = 1u << 21;  // of its JSON
/// The key of the convention in `__metadata__`.
constexpr const char* kConvention = "lowbit";

/// A dtype of the format: its name, its rank in the format's order, and torch's dtype; null if
/// torch has none.
struct SafetensorsDtype {
  const char* name;
  const Dtype* dtype;
  int bits, rank;
};
const SafetensorsDtype* find_safetensors(std::string_view name);
const SafetensorsDtype* find_safetensors(const Dtype& dtype);

/// A tensor of the file. Its shape is torch's.
struct SafetensorsEntry {
  std::string name;
  const Dtype* dtype = nullptr;
  Shape shape;
  uint64_t begin = 0, end = 0;  // behind the header
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the file's order
  std::vector<std::pair<std::string, std::string>> metadata;
  std::vector<std::string> warnings;
};
/// Parses a header. `room` is the number of bytes behind it, all of which must belong to tensors.
Result<SafetensorsHeader> parse_safetensors(std::string_view json, uint64_t room,
                                            const std::string& what);
/// An error where parse_safetensors would not read it.
Result<std::string> safetensors_header(
    const std::vector<SafetensorsEntry>& entries,
    const std::vector<std::pair<std::string, std::string>>& metadata, const std::string& what);

/// A leaf in the convention: its path, and the tensors of the file that hold it.
struct Described {
  enum class Kind : uint8_t { kTensor, kSubclass, kValue };
  Kind kind = Kind::kTensor;
  Path path;
  std::string tensor;  // its name in the file
  Gradient gradient = {};
  Value value;  // of a kSubclass its attributes
  std::string cls;
  const Dtype* dtype = nullptr;  // of a kSubclass, the outer ones
  Shape shape;
  std::vector<std::pair<std::string, std::string>> parts;  // name, and the tensor's in the file
};
struct Description {
  std::vector<Described> leaves;
  std::vector<DictInfo> dicts;
};
/// An error where parse_description would not read it.
Result<std::string> describe(const Description& description, const std::string& what);
Result<Description> parse_description(std::string_view json, const std::string& what);

}  // namespace lowbit::ckpt
