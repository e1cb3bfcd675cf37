// Writing to disk: a folder that appears whole or not at all.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "io/status.h"

namespace lowbit::ckpt {

/// A file being written, sequentially.
class Output {
 public:
  ~Output();
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  uint64_t position() const { return position_ + buffer_.size(); }
  Status write(const void* data, uint64_t bytes);
  Status write(const std::string& bytes) { return write(bytes.data(), bytes.size()); }
  /// Flushes, fsyncs and closes.
  Status close();

 private:
  friend class NewDirectory;
  friend class NewFile;
  Output(int fd, std::string name) : fd_(fd), name_(std::move(name)) {}
  Status put(const char* from, uint64_t bytes);
  Status flush();
  int fd_;
  std::string name_;
  std::string buffer_;
  uint64_t position_ = 0;
};

/// A folder that comes into being under a temporary name beside its place and takes its place when
/// `commit` is called; removed where it never is. A killed process leaves only the temporary
/// folder, `.NAME.partial-XXXXXX`.
class NewDirectory {
 public:
  /// Refuses a place that exists, unless `replace`.
  static Result<std::shared_ptr<NewDirectory>> create(const std::string& path, bool replace);
  ~NewDirectory();
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;
  /// Where the folder is until `commit`.
  const std::string& temporary() const { return temporary_; }
  Result<std::shared_ptr<Output>> file(const std::string& name);
  /// Syncs the folder, and gives it its name in one step; an old folder of that name is removed
  /// after it.
  Status commit();

 private:
  NewDirectory(std::string path, std::string temporary, bool replace)
      : path_(std::move(path)), temporary_(std::move(temporary)), replace_(replace) {}
  std::string path_, temporary_;
  bool replace_, committed_ = false;
};

}  // namespace lowbit::ckpt
