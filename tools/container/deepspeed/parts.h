// A checkpoint that lies in many files of torch.save: its tensors are put together out of parts of
// theirs, by extents alone.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "container/manifest/leaf_names.h"
#include "container/manifest/manifest.h"

namespace lowbit::ckpt {

/// A leaf of one of the files.
struct FileLeaf {
  const Path* path;
  const Tensor* tensor;  // or
  const Value* value;
};

/// One of the files, parsed: its leaves, and the bytes of its tensors.
class PartFile {
 public:
  const std::string& what() const { return what_; }  // safe to print
  /// The leaf at a path; an empty one where there is none.
  FileLeaf find(const Path& path) const;
  /// The value at a path; null where there is none, or a tensor.
  const Value* value(const Path& path) const { return find(path).value; }
  /// Whether the value at a path is True, or a number that is not 0.
  bool is_on(const Path& path) const {
    const Value* const said = value(path);
    return said != nullptr && said->is_on();
  }
  /// Calls `use` with each leaf below a path and its path from there, in the file's order.
  Status for_below(const Path& path,
                   const std::function<Status(const Path&, const FileLeaf&)>& use) const;
  bool has_below(const Path& path) const;
  const Manifest& manifest() const { return manifest_; }
  /// Where the elements of a tensor lie; an error if it is a tensor subclass.
  Result<Payload> payload(const Tensor& tensor) const;
  /// The only element of a tensor, as a number.
  Result<double> number(const Tensor& tensor) const;

 private:
  friend class Parts;
  std::string what_;
  uint32_t file_ = 0;
  Manifest manifest_;
  std::vector<FileLeaf> leaves_;
};

/// Elements of a one-dimensional tensor of a file that are elements [at, at + count) of another.
struct Slice {
  Payload from;
  uint64_t first = 0;  // in `from`
  uint64_t at = 0, count = 0;
};

/// The container of such a checkpoint. Its readers fill it once; afterwards it does not change.
class Parts : public Container {
 public:
  static Result<std::shared_ptr<Parts>> open(const std::string& path);

  FileSet& files() override { return files_; }
  Result<Stored> stored(const Tensor& tensor, const Chunk& chunk) override;
  Result<Value> value(const Blob& blob) override;
  Result<std::vector<Record>> records(const FileExtent& extent, const std::string& what) override;

  const Directory& folder() const { return *folder_; }
  const std::string& what() const { return what_; }  // safe to print
  /// Parses a file of torch.save; `name` as FileSet::add takes it.
  Result<std::shared_ptr<const PartFile>> read(const std::string& name);

  /// Adds a tensor that is another one, in its own shape or, where that has one dimension and as
  /// many elements, in `shape`.
  Status add(Manifest& manifest, Path path, const Payload& from, const Shape& shape);
  /// Adds a tensor made of slices, which come in the order of their places and leave no gap.
  Status add(Manifest& manifest, Path path, const std::vector<Slice>& slices, const Shape& shape);
  Status add(Manifest& manifest, Path path, Value value);
  /// Adds a leaf of a file as it is.
  Status add(Manifest& manifest, Path path, const PartFile& file, const FileLeaf& leaf);
  /// The last step: makes this the container of the manifest.
  void finish(std::shared_ptr<Parts> self, ContainerKind kind, Manifest& manifest);

 private:
  Parts(std::shared_ptr<Directory> folder, std::string path)
      : folder_(folder), files_(std::move(folder)), path_(std::move(path)) {}
  Status add(Manifest& manifest, Tensor tensor, std::vector<Payload> payloads);

  std::shared_ptr<Directory> folder_;
  FileSet files_;
  std::string path_, what_;
  std::map<std::string, std::vector<std::pair<Shape, Payload>>> payloads_;  // by chunks' offsets
  LeafNames names_;
  std::vector<size_t> blobs_;  // in Manifest::order
};

}  // namespace lowbit::ckpt
