// The validated content of a checkpoint, of any container: every name, size and file extent in it
// can be trusted. A container fills the manifest and finds the values.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "container/manifest/dtype.h"
#include "container/manifest/path.h"
#include "container/manifest/record.h"
#include "io/read/file.h"
#include "pickle/plain.h"

namespace lowbit::ckpt {

/// A range of bytes in a file of the checkpoint.
struct FileExtent {
  uint32_t file = 0;       // number in Manifest::file_names
  uint32_t transform = 0;  // 1 + number in Manifest::transforms; 0: the bytes themselves
  uint64_t offset = 0, length = 0;
};

/// A box of a tensor, and the item that holds its values.
struct Chunk {
  Shape offset, shape;
  FileExtent extent;
};

/// How a tensor of a torch.save file uses its storage, which it may share with others or view in
/// part.
struct Alias {
  std::string storage;  // its key in the file
  uint64_t first = 0;   // in elements
  Shape stride;
  uint64_t elements = 0;  // of the whole storage
};

/// What a file keeps of a tensor besides its values.
struct Gradient {
  bool parameter = false, requires_grad = false;
  bool operator==(const Gradient&) const = default;
};

/// A tensor in a file: names, dtype and the extents of its bytes. The first of the forms that one
/// tensor takes on its way through a conversion; a Leaf can be read, a State has a meaning.
struct Tensor {
  std::string name;  // torch's flat name; unique
  Path path;
  const Dtype* dtype = nullptr;
  Shape shape;
  std::vector<Chunk> chunks;        // they tile the shape; sorted by offset
  std::optional<Alias> alias = {};  // where the container keeps sharing
  Gradient gradient = {};
  std::string one_rank = {};  // not empty: these are one rank's values, and what they are
  std::string part = {};      // not empty: this is that inner tensor of the subclass called `name`
  uint64_t place = 0;         // of a directory: among the leaves, in the order of its metadata

  uint64_t bytes() const { return volume(shape) * static_cast<uint64_t>(dtype->bytes); }
};

/// What the leaves do not say about a dict above them: that it is an OrderedDict, and attributes
/// such as `_metadata` of a module's state dict.
struct DictInfo {
  Path path;
  bool ordered = false;
  Value attributes = {};  // a dict, or none
};

/// A leaf that is not a tensor: an item with a pickled value (DCP), parsed on demand, or a value of
/// the container's one tree.
struct Blob {
  std::string name;
  Path path;
  FileExtent extent;  // length 0 where `value` is set
  std::optional<Value> value = {};
  uint64_t place = 0;  // as a tensor's
  // Of a tensor whose dtype is not read, in several parts: nothing here puts them together.
  std::string dtype = {};
  std::vector<FileExtent> more = {};  // all but the first
};
/// An error where a blob is more than one item.
Status check_single(const Blob& blob);

/// The values of a chunk: element (i, j, ...) is element `first + i * stride[0] + ...` of the
/// record. No two of them share an element, but for dimensions of stride 0.
struct Payload {
  const Dtype* dtype = nullptr;
  Shape shape, stride;
  uint64_t first = 0;
  Record record;
};
inline bool is_row_major(const Payload& p) { return is_row_major(p.shape, p.stride); }

/// The content of a chunk's item: a plain tensor (one part without a name), or a tensor subclass
/// with its inner tensors and attributes (torchao's OptimState8bit).
struct Stored {
  std::string cls;  // "torchao.optim.subclass_8bit.OptimState8bit"; "" for a plain tensor
  std::vector<std::pair<std::string, Payload>> parts;
  Value attributes = {};  // a dict, where there is a class
};

/// The part of an item that `tensor` stands for: all of it, or the inner tensor `tensor.part`.
Result<Stored> part_of(Stored stored, const Tensor& tensor, const std::string& what);
class RecordReader;

/// A container, open for reading. All functions are thread-safe.
class Container {
 public:
  Container();
  virtual ~Container();
  virtual FileSet& files() = 0;
  /// The values of a chunk, checked against the manifest: dtype, shape, strides inside the record.
  /// Of a subclass the outer shape and dtype are checked; its parts have their own.
  virtual Result<Stored> stored(const Tensor& tensor, const Chunk& chunk) = 0;
  /// Whether the item of a chunk may be a subclass: a cheap hint. `stored` knows.
  virtual Result<bool> seems_subclass(const Tensor&, const Chunk&) { return true; }
  /// The value of a blob; an error if it is not a plain value.
  virtual Result<Value> value(const Blob& blob) = 0;
  /// The extent of an item's archive after its transform is undone; the same extent without one.
  virtual Result<FileExtent> plain(const FileExtent& extent, const std::string&) { return extent; }
  /// All records of an item, whose checksums a copy of the whole item must verify.
  virtual Result<std::vector<Record>> records(const FileExtent& extent,
                                              const std::string& what) = 0;
  /// The one reader of the container's records, so that each byte enters its checksum once.
  RecordReader& reader();

 private:
  std::once_flag once_;
  std::unique_ptr<RecordReader> reader_;
};

/// How a checkpoint lies on disk.
enum class ContainerKind : uint8_t { kDcp, kTorch, kLegacy, kSafetensors, kZero, kUniversal };
/// "dcp", "torch", "legacy", "safetensors", "zero", "universal".
const char* container_name(ContainerKind kind);

struct Manifest {
  ContainerKind kind = ContainerKind::kDcp;
  std::string path;  // as it was given
  std::shared_ptr<Container> container;
  std::string metadata_digest;  // of a directory's .metadata; empty where ranks wrote their own
  std::vector<std::string> file_names;
  std::vector<std::string> transforms;  // such as "stream.zstd/1"
  std::vector<Tensor> tensors;          // by name
  std::vector<Blob> blobs;              // by name
  std::vector<size_t> order;    // of leaves in the tree: i, or tensors.size() + blob; may be empty
  std::vector<DictInfo> dicts;  // those that are more than a plain dict
  bool of_tool = false;         // a directory that lowbit-ckpt wrote, not the ranks of a program
  bool has_paths = false;       // false: paths are only the flat name
  bool tells_keys = true;       // false: a directory that has numbers and places in tuples as text
  std::vector<std::string> warnings;  // harmless oddities, one line each
  std::vector<std::string> facts;     // what else is worth telling: who wrote it
  std::vector<std::pair<std::string, std::string>> texts;  // __metadata__ of a safetensors file
};

}  // namespace lowbit::ckpt
