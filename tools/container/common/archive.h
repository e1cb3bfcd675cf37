// A checkpoint that is one file: the container of torch.save and safetensors.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "container/manifest/leaf_names.h"
#include "container/manifest/manifest.h"

namespace lowbit::ckpt {

/// The values of every tensor of the file. Its reader fills it once; afterwards it does not change.
class Archive : public Container {
 public:
  /// Opens a file that the user named. Links on its path are followed.
  static Result<std::shared_ptr<Archive>> open(const std::string& path);
  /// Opens a file of a folder, without following a link; `name` as FileSet::add takes it.
  static Result<std::shared_ptr<Archive>> open(std::shared_ptr<Directory> folder,
                                               const std::string& name);

  FileSet& files() override { return files_; }
  Result<Stored> stored(const Tensor& tensor, const Chunk& chunk) override;
  Result<Value> value(const Blob& blob) override;
  /// The records inside an extent.
  Result<std::vector<Record>> records(const FileExtent& extent, const std::string& what) override;

  Result<std::shared_ptr<const File>> file() { return files_.open(0); }
  const std::string& what() const { return what_; }  // safe to print
  /// Adds a tensor to the manifest; a second tensor of the same flat name is an error.
  Status add(Manifest& manifest, Tensor tensor, Stored stored);
  void add(Record record) { records_.push_back(std::move(record)); }
  /// Adds a value that is not a tensor.
  Status add(Manifest& manifest, Path path, Value value);
  /// The last step: makes this the container of the manifest.
  void finish(std::shared_ptr<Archive> self, ContainerKind kind, Manifest& manifest);

 private:
  Archive(std::shared_ptr<Directory> folder, std::string path)
      : files_(std::move(folder)), path_(std::move(path)) {}

  FileSet files_;
  std::string path_, what_;
  std::unordered_map<std::string, Stored> tensors_;
  LeafNames names_;
  std::vector<Record> records_;
};

}  // namespace lowbit::ckpt
