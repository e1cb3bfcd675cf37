// What a container holds, validated: after reading it, code may trust every name, size and place in
// here.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "io/file.h"

namespace lowbit::ckpt {

/// A torch dtype. `storage` is the storage class that _rebuild_tensor_v2 names; empty where only
/// UntypedStorage holds it.
struct Dtype {
  const char* name;
  int bytes;
  const char* storage;
};
/// Null where there is none of that name ("float32").
const Dtype* find_dtype(const std::string& name);
/// Null where there is none of that storage class ("FloatStorage").
const Dtype* find_storage(const std::string& storage);

using Shape = std::vector<int64_t>;
/// The product of the sizes, or an error where it does not fit or a size is negative.
Result<uint64_t> elements(const Shape& shape, const std::string& what);
std::string shape_text(const Shape& shape);

/// Where an item lies.
struct Place {
  std::string file;
  uint64_t offset = 0, length = 0;
  bool operator==(const Place&) const = default;
};

/// A box of a tensor, and the item that holds it.
struct Chunk {
  Shape offset, shape;
  Place place;
};

/// The way to a leaf through nested dicts and lists.
using Path = std::vector<std::variant<std::string, int64_t>>;

struct Tensor {
  std::string name;
  const Dtype* dtype = nullptr;
  Shape shape;
  std::vector<Chunk> chunks;  // they tile the shape
};

/// A leaf that is no tensor: a pickled value, opaque here.
struct Blob {
  std::string name;
  Place place;
};

struct Manifest {
  std::shared_ptr<Directory> folder;
  std::map<std::string, std::shared_ptr<File>> files;
  std::vector<Tensor> tensors;  // by name
  std::vector<Blob> blobs;      // by name
  bool has_paths = false;
  std::map<std::string, Path> paths;
  std::vector<std::string> facts;  // what else is worth telling: version, who wrote it
};

}  // namespace lowbit::ckpt
