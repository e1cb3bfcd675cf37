// Writing to disk: a folder that appears whole or not at all.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "io/status.h"

namespace lowbit::ckpt {

/// A file being written, at any place and from any thread. Thousands may be written at once, more
/// than a process may hold open: those used longest ago are closed meanwhile.
class OutputFile {
 public:
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  const std::string& path() const { return path_; }
  Status write(uint64_t offset, const void* data, uint64_t bytes);
  /// Waits until the disk has everything.
  Status sync();

 private:
  friend class NewDirectory;
  friend class NewFile;
  class Handle;
  /// The files of one writer that are open.
  struct Pool {
    std::mutex lock;
    std::list<OutputFile*> open;  // opened last in front
  };
  OutputFile(std::shared_ptr<Pool> pool, std::string path)
      : pool_(std::move(pool)), path_(std::move(path)) {}
  Result<std::shared_ptr<Handle>> handle();

  std::shared_ptr<Pool> pool_;
  std::string path_;
  std::shared_ptr<Handle> handle_;  // null while closed
  bool created_ = false;
  std::atomic<uint64_t> begun_ = 0;  // bytes that were written and not yet sent to the disk
};

/// A place in a file where bytes are appended.
class Output {
 public:
  Output(std::shared_ptr<OutputFile> file, uint64_t position, uint64_t buffer = 1u << 18)
      : file_(std::move(file)), position_(position), most_(buffer) {}
  /// One that only counts, and one that appends to a text.
  Output() = default;
  explicit Output(std::string* text) : text_(text) {}
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  uint64_t position() const { return position_ + buffer_.size(); }
  Status write(const void* data, uint64_t bytes);
  Status write(const std::string& bytes) { return write(bytes.data(), bytes.size()); }
  /// Hands what is buffered to the file.
  Status flush();
  /// Flushes, and waits until the disk has the file.
  Status close();

 private:
  std::shared_ptr<OutputFile> file_;
  std::string* text_ = nullptr;
  std::string buffer_;
  uint64_t position_ = 0;  // of the buffer's start
  uint64_t most_ = 0;      // headers are collected up to here; longer pieces go past the buffer
};

/// The temporary name of what shall be NAME in its folder is .NAME.partial-XXXXXX.
std::string partial_name(const std::string& name);
/// Whether a path's last name is such a one: what lies there was being written when its program was
/// killed.
bool is_partial(const std::string& path);

/// A folder that comes into being under a temporary name beside its place and takes its place when
/// `commit` is called; removed where it never is. A killed process leaves only the temporary
/// folder, `.NAME.partial-XXXXXX`.
class NewDirectory {
 public:
  /// Refuses a place that exists, unless `replace` and what is there is an empty folder or a
  /// checkpoint. None of `sources` may be that place or lie in it.
  static Status check(const std::string& path, bool replace,
                      const std::vector<std::string>& sources = {});
  /// After `check`, the folder.
  static Result<std::shared_ptr<NewDirectory>> create(const std::string& path, bool replace,
                                                      const std::vector<std::string>& sources = {});
  ~NewDirectory();
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;
  /// Where the folder is until `commit`.
  const std::string& temporary() const { return temporary_; }
  /// A new file in it.
  Result<std::shared_ptr<OutputFile>> part(const std::string& name);
  /// The same, written from its start to its end.
  Result<std::shared_ptr<Output>> file(const std::string& name);
  /// Syncs the folder, and gives it its name in one step; an old folder of that name is removed
  /// after it. A file system that cannot exchange two folders sees the old one renamed to
  /// `.NAME.partial-XXXXXX.old` first, and that is what a kill between the two steps leaves.
  Status commit();

 private:
  NewDirectory(std::string path, std::string temporary, bool replace)
      : path_(std::move(path)), temporary_(std::move(temporary)), replace_(replace) {}
  Status take_place();
  std::string path_, temporary_, old_;
  bool replace_, committed_ = false;
  std::shared_ptr<OutputFile::Pool> pool_ = std::make_shared<OutputFile::Pool>();
};

}  // namespace lowbit::ckpt
