// A checkpoint that is one file: what its readers have in common.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "container/manifest.h"

namespace lowbit::ckpt {

/// Knows of every tensor where its values lie. A file's reader fills it once, and nothing is
/// changed afterwards.
class Archive : public Container {
 public:
  /// A file that was named by a user: links on the way to it are theirs, and followed.
  static Result<std::shared_ptr<Archive>> open(const std::string& path);

  FileSet& files() override { return files_; }
  Result<Stored> stored(const Tensor& tensor, const Chunk& chunk) override;
  Result<Value> value(const Blob& blob) override;
  /// Records that lie in the place.
  Result<std::vector<Record>> records(const Place& place, const std::string& what) override;

  Result<std::shared_ptr<const File>> file() { return files_.open(0); }
  const std::string& what() const { return what_; }  // safe to print
  /// Adds a tensor to the manifest. Flat names are unique.
  Status add(Manifest& manifest, Tensor tensor, Stored stored);
  void add(Record record) { records_.push_back(std::move(record)); }
  /// Adds a value that is no tensor.
  Status add(Manifest& manifest, Path path, Value value);
  /// The last step: this is the manifest's container.
  void finish(std::shared_ptr<Archive> self, ContainerKind kind, Manifest& manifest);

 private:
  Archive(std::shared_ptr<Directory> folder, std::string path)
      : files_(std::move(folder)), path_(std::move(path)) {}
  Status take(const std::string& name);

  FileSet files_;
  std::string path_, what_;
  std::unordered_map<std::string, Stored> tensors_;
  std::unordered_map<std::string, bool> names_;
  std::vector<Record> records_;
};

}  // namespace lowbit::ckpt
