// What a checkpoint holds, validated, whatever container it came in: after reading it, code may
// trust every name, size and place in here. A container fills it and answers where values lie.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "container/dtype.h"
#include "container/path.h"
#include "io/file.h"
#include "pickle/plain.h"

namespace lowbit::ckpt {

/// Bytes of a file of the checkpoint.
struct Place {
  uint32_t file = 0;       // number in Manifest::file_names
  uint32_t transform = 0;  // 1 + number in Manifest::transforms; 0: the bytes themselves
  uint64_t offset = 0, length = 0;
};

/// A box of a tensor and the item that holds it.
struct Chunk {
  Shape offset, shape;
  Place place;
};

/// A tensor that several leaves of a torch.save file share, or that is a view.
struct Alias {
  std::string storage;  // its key in the file
  uint64_t first = 0;   // in elements
  Shape stride;
  uint64_t elements = 0;  // of the whole storage
  bool parameter = false, requires_grad = false;
};

struct Tensor {
  std::string name;  // torch's flat name; unique
  Path path;
  const Dtype* dtype = nullptr;
  Shape shape;
  std::vector<Chunk> chunks;        // they tile the shape; sorted by offset
  std::optional<Alias> alias = {};  // where the container keeps sharing
  std::string part = {};  // not empty: this is that inner tensor of the subclass called `name`

  uint64_t bytes() const { return volume(shape) * static_cast<uint64_t>(dtype->bytes); }
};

/// What leaves do not tell of a dict, list or tuple in the tree that has some: that it is an
/// OrderedDict, and attributes such as `_metadata` of a module's state dict.
struct Holder {
  Path path;
  bool ordered = false;
  Value attributes = {};  // a dict, or none
};

/// A leaf that is no tensor: a pickled value of its own (DCP), opaque until it is asked for, or a
/// value that the container's one tree holds.
struct Blob {
  std::string name;
  Path path;
  Place place;  // length 0 where `value` is set
  std::optional<Value> value = {};
};

/// A run of bytes with the CRC-32 that its writer computed.
struct Record {
  std::string name;
  uint32_t file = 0;
  uint64_t offset = 0, size = 0;
  uint32_t crc = 0;
  bool has_crc = false;
};

/// Where a chunk's values lie: element (i, j, ...) is at `first + i * stride[0] + ...` of the
/// record, counted in elements. No element is there twice.
struct Payload {
  const Dtype* dtype = nullptr;
  Shape shape, stride;
  uint64_t first = 0;
  Record record;
};

/// What a chunk's item holds: a plain tensor (one part without a name), or a tensor subclass with
/// its inner tensors and what else its pickle keeps (torchao's OptimState8bit).
struct Stored {
  std::string cls;  // "torchao.optim.subclass_8bit.OptimState8bit"; "" for a plain tensor
  std::vector<std::pair<std::string, Payload>> parts;
  Value attributes = {};  // a dict, where there is a class
};

/// What `tensor` stands for in it: the whole, or its inner tensor `tensor.part`.
Result<Stored> part_of(Stored stored, const Tensor& tensor, const std::string& what);
class RecordReader;

/// A container's own knowledge. Every function may be called from several threads.
class Container {
 public:
  Container();
  virtual ~Container();
  virtual FileSet& files() = 0;
  /// The chunk's values, held against the manifest: dtype, shape, strides inside the record. A
  /// subclass's outer shape and dtype are held against it, its parts' are their own.
  virtual Result<Stored> stored(const Tensor& tensor, const Chunk& chunk) = 0;
  /// Whether the chunk's item may be a subclass; a hint that costs little, `stored` tells.
  virtual Result<bool> seems_subclass(const Tensor&, const Chunk&) { return true; }
  /// The value of a blob, where it is plain data.
  virtual Result<Value> value(const Blob& blob) = 0;
  /// Where the item's archive lies once its transform is undone; the place itself without one.
  virtual Result<Place> plain(const Place& place, const std::string&) { return place; }
  /// All records of an item, for one who copies it whole and wants their checksums held.
  virtual Result<std::vector<Record>> records(const Place& place, const std::string& what) = 0;
  /// Through which everybody reads its records, so that each byte's checksum is held once.
  RecordReader& reader();

 private:
  std::once_flag once_;
  std::unique_ptr<RecordReader> reader_;
};

/// How a checkpoint lies on disk.
enum class ContainerKind : uint8_t { kDcp, kTorch, kLegacy, kSafetensors };
/// "dcp", "torch", "legacy", "safetensors".
const char* container_name(ContainerKind kind);

struct Manifest {
  ContainerKind kind = ContainerKind::kDcp;
  std::string path;  // as it was given
  std::shared_ptr<Container> container;
  std::vector<std::string> file_names;
  std::vector<std::string> transforms;  // such as "stream.zstd/1"
  std::vector<Tensor> tensors;          // by name
  std::vector<Blob> blobs;              // by name
  std::vector<size_t> order;    // of leaves in the tree: i, or tensors.size() + blob; may be empty
  std::vector<Holder> holders;  // those that are more than a plain dict
  bool has_paths = false;       // false: paths are only the flat name
  std::vector<std::string> warnings;  // harmless oddities, one line each
  std::vector<std::string> facts;     // what else is worth telling: who wrote it

  uint64_t tensor_bytes() const {
    uint64_t bytes = 0;
    for (const Tensor& t : tensors) bytes += t.bytes();
    return bytes;
  }
};

}  // namespace lowbit::ckpt
