// Reading from disk: the only place that opens files to read. Links inside a checkpoint are not
// followed, nothing outside the folder that was named is reached, and a file that changes under
// our hands is noticed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "io/status.h"

namespace lowbit::ckpt {

/// What tells a file from another, and from itself after a change.
struct FileIdentity {
  uint64_t device = 0, inode = 0, size = 0;
  int64_t seconds = 0, nanoseconds = 0;
  bool operator==(const FileIdentity&) const = default;
};

/// The error of what could not be opened, by `errno`: bad input, unless the machine refused.
Error not_opened(const std::string& what);

/// A regular file, open for reading.
class File {
 public:
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  uint64_t size() const { return identity_.size; }
  const FileIdentity& identity() const { return identity_; }
  /// Safe to print.
  const std::string& name() const { return name_; }
  /// A file that holds these bytes and has no name on disk.
  static Result<std::shared_ptr<File>> of_bytes(std::string_view bytes, std::string name);
  /// Exactly `bytes` bytes at `offset`, or an error that names the file.
  Status read(uint64_t offset, void* out, uint64_t bytes) const;

 private:
  friend class Directory;
  friend class Scratch;
  File(int fd, FileIdentity identity, std::string name)
      : fd_(fd), identity_(identity), name_(std::move(name)) {}
  int fd_;
  FileIdentity identity_;
  std::string name_;
};

/// A file without a name in TMPDIR (or /tmp), for what is too large for memory: it is gone when the
/// last one who holds it is.
class Scratch {
 public:
  static Result<Scratch> create();
  Scratch(Scratch&& other) noexcept;
  Scratch& operator=(Scratch&&) = delete;
  ~Scratch();
  Status append(const void* data, uint64_t bytes);
  /// What was appended, for reading. `name` is what errors call it.
  std::shared_ptr<File> finish(std::string name);

 private:
  Scratch(int fd, std::string folder) : fd_(fd), folder_(std::move(folder)) {}
  int fd_;
  std::string folder_;
  uint64_t size_ = 0;
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

/// The files of one checkpoint by number. A checkpoint may have more of them than a process may
/// hold open, so only those used last are. After the last `add`, every function may be called from
/// several threads.
class FileSet {
 public:
  explicit FileSet(std::shared_ptr<Directory> folder) : folder_(std::move(folder)) {}
  /// Opens the file to learn its size; numbers count from 0 in the order of the calls.
  Status add(const std::string& name);
  using Make = std::function<Result<std::shared_ptr<File>>()>;
  /// A file that is made where it is needed (a decompressed item), and again where it was dropped
  /// meanwhile. Returns its number.
  uint32_t add_made(std::string name, Make make);
  size_t count() const;
  uint64_t size(uint32_t number) const;
  /// Safe to print.
  std::string name(uint32_t number) const;
  Result<std::shared_ptr<const File>> open(uint32_t number);
  /// An error where a file is not what it was when it was added.
  Status check_unchanged();

 private:
  struct Member {
    std::string name;
    FileIdentity identity;
    std::shared_ptr<const File> file;  // null while closed
    uint64_t used = 0;
    Make make;
  };
  /// Under the lock: holds `file` open as that of `member`, and lets go of the one used longest ago.
  void keep(uint32_t number, std::shared_ptr<const File> file);

  std::shared_ptr<Directory> folder_;
  mutable std::mutex lock_;
  std::vector<Member> files_;
  std::vector<uint32_t> open_, made_;  // that are held open
  uint64_t clock_ = 0;
};

}  // namespace lowbit::ckpt
