// The only place that opens files. Reading never follows a link and never leaves the folder that
// was named; what is written appears whole or not at all.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "io/status.h"

namespace lowbit::ckpt {

/// A regular file, open for reading.
class File {
 public:
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  uint64_t size() const { return size_; }
  const std::string& name() const { return name_; }
  /// A file that holds these bytes and has no name on disk.
  static Result<std::shared_ptr<File>> of_bytes(std::string_view bytes, std::string name);
  /// Exactly `bytes` bytes at `offset`, or an error that names the file.
  Status read(uint64_t offset, void* out, uint64_t bytes) const;

 private:
  friend class Directory;
  File(int fd, uint64_t size, std::string name) : fd_(fd), size_(size), name_(std::move(name)) {}
  int fd_;
  uint64_t size_;
  std::string name_;
};

/// A folder, open for reading.
class Directory {
 public:
  static Result<std::shared_ptr<Directory>> open(const std::string& path);
  ~Directory();
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  const std::string& path() const { return path_; }
  /// Names of the entries, sorted.
  Result<std::vector<std::string>> list() const;
  bool has(const std::string& name) const;
  /// `name` must be a plain name: no '/', not '.' or '..'. Links, and anything but a regular file,
  /// are refused.
  Result<std::shared_ptr<File>> file(const std::string& name) const;
  /// The whole of a file of at most `limit` bytes.
  Result<std::string> content(const std::string& name, uint64_t limit) const;

 private:
  Directory(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_;
  std::string path_;
};

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
  Output(int fd, std::string name) : fd_(fd), name_(std::move(name)) {}
  Status flush();
  int fd_;
  std::string name_;
  std::string buffer_;
  uint64_t position_ = 0;
};

/// A folder that comes into being under a temporary name beside its place and takes its place when
/// `commit` is called; removed where it never is.
class NewDirectory {
 public:
  /// Refuses a place that exists, unless `replace`.
  static Result<std::shared_ptr<NewDirectory>> create(const std::string& path, bool replace);
  ~NewDirectory();
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;
  Result<std::shared_ptr<Output>> file(const std::string& name);
  Status commit();

 private:
  NewDirectory(std::string path, std::string temporary, bool replace)
      : path_(std::move(path)), temporary_(std::move(temporary)), replace_(replace) {}
  std::string path_, temporary_;
  bool replace_, committed_ = false;
};

/// A name from a file, safe to print: control characters, quotes and broken UTF-8 escaped.
std::string printable(const std::string& name);

}  // namespace lowbit::ckpt
