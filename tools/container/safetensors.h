// The header of a safetensors file: what it may say, and how we say in its one map of texts what the
// format has no place for.
#pragma once

#include <string>
#include <vector>

#include "container/document.h"
#include "container/dtype.h"

namespace lowbit::ckpt {

constexpr uint64_t kMostSafetensorsHeader = 100'000'000;
/// Our key in `__metadata__`.
constexpr const char* kConvention = "lowbit";

/// A dtype as the format calls it, and its place in the format's order; `dtype` is null where torch
/// has none.
struct SafetensorsDtype {
  const char* name;
  const Dtype* dtype;
  int bits, rank;
};
const SafetensorsDtype* find_safetensors(std::string_view name);
const SafetensorsDtype* find_safetensors(const Dtype& dtype);

/// A tensor of the file; the shape is torch's.
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
/// `room`: the bytes behind the header, all of which must be some tensor's.
Result<SafetensorsHeader> parse_safetensors(std::string_view json, uint64_t room,
                                            const std::string& what);
std::string safetensors_header(const std::vector<SafetensorsEntry>& entries,
                               const std::vector<std::pair<std::string, std::string>>& metadata);

/// A leaf as our convention describes it: where it lies in the tree, and which tensors it is.
struct Described {
  enum class Kind : uint8_t { kTensor, kSubclass, kValue };
  Kind kind = Kind::kTensor;
  Path path;
  std::string tensor;  // its name in the file
  Value value;         // of a kSubclass its attributes
  std::string cls;
  const Dtype* dtype = nullptr;  // of a kSubclass, the outer ones
  Shape shape;
  std::vector<std::pair<std::string, std::string>> parts;  // name, and the tensor's in the file
};
struct Description {
  std::vector<Described> leaves;
  std::vector<Holder> holders;
};
std::string describe(const Description& description);
Result<Description> parse_description(std::string_view json, const std::string& what);

}  // namespace lowbit::ckpt
