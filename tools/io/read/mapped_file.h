// Bytes of a file in the system's own pages: for pieces that are too short for a read each.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "io/read/file.h"

namespace lowbit::ckpt {

/// Windows of a file, mapped one after the other.
///
/// A page that cannot be read, or a file that became shorter, would be a signal where a read is an
/// error. So the system is asked for all pages of a window before they are touched, and tells; and
/// only files of this machine's own disks and memory are mapped.
class MappedFile {
 public:
  explicit MappedFile(std::shared_ptr<const File> file) : file_(std::move(file)) {}
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();
  /// The bytes at `offset`, until the next call. Null where the file cannot be mapped, or not all
  /// of them were read: `File::read` says why. `end`: what later calls will ask for ends there.
  const char* at(uint64_t offset, uint64_t bytes, uint64_t end);
  /// Whether the window of the last call has these bytes.
  bool covers(uint64_t offset, uint64_t bytes) const {
    return window_ != nullptr && begin_ <= offset && offset + bytes <= end_;
  }
  const std::shared_ptr<const File>& file() const { return file_; }
  /// Unmaps the window if the file no longer has all of it.
  void drop_if_shorter();

 private:
  void drop();
  std::shared_ptr<const File> file_;
  std::optional<bool> mappable_;  // once it was asked
  char* window_ = nullptr;
  uint64_t begin_ = 0, end_ = 0;  // of the window, in the file
};

/// Mapped files that nobody uses at the moment: the next tensor often lies in the window of the
/// last one. Thread-safe.
class MappedFiles {
 public:
  std::unique_ptr<MappedFile> take(std::shared_ptr<const File> file);
  void give_back(std::unique_ptr<MappedFile> one);

 private:
  std::mutex lock_;
  std::vector<std::unique_ptr<MappedFile>> idle_;  // the one used last comes last
};

}  // namespace lowbit::ckpt
