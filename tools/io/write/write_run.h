// Writes that follow one another in a file, handed to the system in long runs.
#pragma once

#include <sys/uio.h>

#include <memory>
#include <string>
#include <vector>

#include "io/write/output.h"

namespace lowbit::ckpt {

/// Collects writes up to a multiple of 256 KiB of the file, and writes them in one call.
///
/// The system then keeps these in one run of pages, which is cheaper to write, to read and to map.
/// Runs of 2 MiB, which one entry maps, save little more, and a virtual machine that gives its free
/// memory back has to ask its host for each. Not thread-safe.
class WriteRun : public ByteSink {
 public:
  explicit WriteRun(std::shared_ptr<OutputFile> file) : file_(std::move(file)) {}
  /// Up to kCopied bytes are copied. Longer pieces must live until `flush`. A gap of less than 64
  /// bytes behind the last write is filled with zeros.
  Status write(uint64_t offset, const void* data, uint64_t bytes) override;
  Status flush();
  Status sync() override;

  static constexpr uint64_t kCopied = 1u << 12;

 private:
  Status add(const char* data, uint64_t bytes, bool copied);
  std::shared_ptr<OutputFile> file_;
  uint64_t begin_ = 0, end_ = 0;  // of the run, in the file
  std::vector<iovec> pieces_;
  std::string copies_;  // never grows beyond its capacity: pieces point into it
};

}  // namespace lowbit::ckpt
