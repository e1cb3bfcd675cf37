// Files open for reading. Those on disk are made here, those in an object store in io/read/store.h,
// and io/read/open.h opens either. Every read goes through here: links inside a checkpoint are not
// followed, nothing outside the named folder is opened, and a file that changes meanwhile is an
// error.
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

/// What identifies a file and its version: two identities differ if the file was replaced or
/// changed.
struct FileIdentity {
  uint64_t device = 0, inode = 0, size = 0;
  int64_t seconds = 0, nanoseconds = 0;
  std::string version = {};  // of an object, as its store tells: an ETag, a generation, a time
  bool operator==(const FileIdentity&) const = default;
};

/// The error for a file that could not be opened, by `errno`: bad input, or an I/O error if the
/// system refused (permission, too many open files, no memory).
Error not_opened(const std::string& what);

/// What a path names.
enum class PathKind : uint8_t { kMissing, kFile, kFolder, kPipe, kOther };

/// A file or an object, open for reading.
class File {
 public:
  virtual ~File() = default;
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
  /// For io/read/mapped_file.h; -1 where the system has no such file.
  virtual int descriptor() const { return -1; }

 protected:
  File(FileIdentity identity, std::string name)
      : identity_(std::move(identity)), name_(std::move(name)) {}

 private:
  /// The same of bytes that lie inside the file.
  virtual Status fetch(uint64_t offset, char* out, uint64_t bytes) const = 0;
  FileIdentity identity_;
  std::string name_;
};

/// A nameless temporary file in TMPDIR (or /tmp), for data too large for memory. It is deleted with
/// its last reference.
class Scratch {
 public:
  static Result<Scratch> create();
  Scratch(Scratch&& other) noexcept;
  Scratch& operator=(Scratch&&) = delete;
  ~Scratch();
  Status append(const void* data, uint64_t bytes);
  /// The appended bytes, for reading. `name` names the file in errors.
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
  /// A folder on disk.
  static Result<std::shared_ptr<Directory>> local(const std::string& path);
  virtual ~Directory() = default;
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  const std::string& path() const { return path_; }
  /// The path of an entry, safe to print.
  virtual std::string shown(const std::string& name) const;
  /// Names of the entries, sorted.
  virtual Result<std::vector<std::string>> list() const = 0;
  virtual bool has(const std::string& name) const = 0;
  /// A regular file of the folder. `name` has no '/' and is not '.' or '..'; a link or any other
  /// kind of file is an error.
  virtual Result<std::shared_ptr<File>> file(const std::string& name) const = 0;
  /// A folder in the folder, by the same rules.
  virtual Result<std::shared_ptr<Directory>> folder(const std::string& name) const = 0;
  /// Has `file` tell what is there now, where it remembers what was.
  virtual Status refresh() { return fine(); }
  /// The content of a file; an error if it has more than `limit` bytes.
  Result<std::string> content(const std::string& name, uint64_t limit) const;

 protected:
  explicit Directory(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

/// Whether `name` is that of an entry of a folder: it has no '/' and is not '.' or '..'.
bool is_entry_name(const std::string& name);

/// The files of one checkpoint, by number. Only the ones used last are open, because a checkpoint
/// may have more files than a process can open. After the last `add`, all functions are
/// thread-safe.
class FileSet {
 public:
  explicit FileSet(std::shared_ptr<Directory> folder) : folder_(std::move(folder)) {}
  /// Adds a file of the folder, which is opened to learn its size. Numbers count from 0 in the
  /// order of the calls.
  Status add(const std::string& name);
  /// The same of "a/b/c", a file of a folder in the folder; no link on that way is followed.
  Status add_inner(const std::string& name);
  using Make = std::function<Result<std::shared_ptr<File>>()>;
  /// Adds a file that `make` creates when it is needed, such as a decompressed item, and again
  /// after it was closed. Returns its number.
  uint32_t add_made(std::string name, Make make);
  size_t count() const;
  uint64_t size(uint32_t number) const;
  FileIdentity identity(uint32_t number) const;
  /// Its name in the folder, safe to print.
  std::string name(uint32_t number) const;
  /// Its path, safe to print: several folders may have files of one name.
  std::string shown(uint32_t number) const;
  Result<std::shared_ptr<const File>> open(uint32_t number);
  /// An error if a file has changed since it was added.
  Status check_unchanged();

 private:
  struct Member {
    std::string name;
    FileIdentity identity;
    std::shared_ptr<const File> file;  // null while closed
    uint64_t used = 0;
    Make make;
  };
  /// Under the lock: keeps `file` open, and closes those used longest ago where there are too many.
  void keep(uint32_t number, std::shared_ptr<const File> file);
  void remember(const std::string& name, const File& file);
  /// Under the lock: opens a file by its way from the folder.
  Result<std::shared_ptr<File>> find(const std::string& name);

  std::shared_ptr<Directory> folder_;
  std::shared_ptr<Directory> inner_;  // the folder that the last file was found in,
  std::string inner_name_;            // and its way from `folder_`; empty where there is none
  mutable std::mutex lock_;
  std::vector<Member> files_;
  std::vector<uint32_t> open_, made_;  // numbers of open files
  uint64_t made_bytes_ = 0;            // of those that were made
  uint64_t clock_ = 0;
};

}  // namespace lowbit::ckpt
