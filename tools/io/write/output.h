// Files open for writing, and buffered output to them.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/status.h"

struct iovec;

namespace lowbit::ckpt {

/// What takes bytes at offsets of a file.
class ByteSink {
 public:
  virtual ~ByteSink() = default;
  virtual Status write(uint64_t offset, const void* data, uint64_t bytes) = 0;
  /// Waits until all bytes are on the disk.
  virtual Status sync() = 0;
};

/// A file being written, at any offset and from any thread. Thousands may be written at once: the
/// ones used longest ago are closed meanwhile, so that a process never has too many open.
class OutputFile : public ByteSink {
 public:
  ~OutputFile() override;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  const std::string& path() const { return path_; }
  Status write(uint64_t offset, const void* data, uint64_t bytes) override;
  /// Writes pieces of memory one after the other, in one call of the system. Changes `pieces`.
  Status write(uint64_t offset, std::span<iovec> pieces);
  Status sync() override;
  /// Gives its bytes back to the disk, where it was written at all and can.
  void clear();
  /// `sync` will not be called: the disk is not told to begin while there is more to write.
  void leave_to_system() { eager_ = false; }

 private:
  friend class NewDirectory;
  friend class NewFile;
  friend class SharedDirectory;
  class Handle;
  /// The open files of one writer.
  struct Pool {
    std::mutex lock;
    std::list<OutputFile*> open;  // the one opened last comes first
    void close_oldest();
    void close_all();
  };
  OutputFile(std::shared_ptr<Pool> pool, std::string path)
      : pool_(std::move(pool)), path_(std::move(path)) {}
  Result<std::shared_ptr<Handle>> handle();

  std::shared_ptr<Pool> pool_;
  std::string path_;
  std::shared_ptr<Handle> handle_;  // null while closed
  bool created_ = false, eager_ = true;
  std::atomic<uint64_t> begun_ = 0;  // bytes written and not yet sent to the disk
};

/// Buffered output: bytes are appended at a position of a file.
class Output {
 public:
  Output(std::shared_ptr<ByteSink> file, uint64_t position, uint64_t buffer = 1u << 18)
      : file_(std::move(file)), position_(position), limit_(buffer) {}
  /// Without a file: counts the bytes, or appends them to a string.
  Output() = default;
  explicit Output(std::string* text) : text_(text) {}
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  uint64_t position() const { return position_ + buffer_.size(); }
  Status write(const void* data, uint64_t bytes);
  Status write(const std::string& bytes) { return write(bytes.data(), bytes.size()); }
  /// Writes the buffer to the file.
  Status flush();
  /// Flushes, and waits until the file is on the disk.
  Status close();

 private:
  std::shared_ptr<ByteSink> file_;
  std::string* text_ = nullptr;
  std::string buffer_;
  uint64_t position_ = 0;  // of the buffer's start
  uint64_t limit_ = 0;     // headers are collected up to here; longer pieces go past the buffer
};

}  // namespace lowbit::ckpt
