#include "io/write/write_run.h"

#include <algorithm>

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kRun = 1u << 18;  // bytes that the system may keep in one run of pages
constexpr uint64_t kMaxGap = 64;     // between two writes of one run
constexpr size_t kMaxPieces = 512;   // the system takes 1024
constexpr size_t kMaxCopies = 256u << 10;

}  // namespace

Status WriteRun::write(uint64_t offset, const void* data, uint64_t bytes) {
  if (bytes == 0) return fine();
  if (offset < end_ || offset - end_ >= kMaxGap) {
    RETURN_IF_ERROR(flush());
    begin_ = end_ = offset;
  }
  static constexpr char kZeros[kMaxGap] = {};
  RETURN_IF_ERROR(add(kZeros, offset - end_, false));
  return add(static_cast<const char*>(data), bytes, bytes <= kCopied);
}

Status WriteRun::add(const char* data, uint64_t bytes, bool copied) {
  while (bytes > 0) {
    const uint64_t n = std::min(bytes, kRun - end_ % kRun);
    if (copied && copies_.size() + n > copies_.capacity()) {
      RETURN_IF_ERROR(flush());
      copies_.reserve(kMaxCopies);
    }
    const char* from = data;
    if (copied) {
      from = copies_.data() + copies_.size();
      copies_.append(data, n);
    }
    pieces_.push_back({const_cast<char*>(from), n});
    data += n;
    bytes -= n;
    end_ += n;
    if (end_ % kRun == 0 || pieces_.size() == kMaxPieces) RETURN_IF_ERROR(flush());
  }
  return fine();
}

Status WriteRun::flush() {
  const Status done = pieces_.empty() ? fine() : file_->write(begin_, pieces_);
  begin_ = end_;
  pieces_.clear();
  copies_.clear();
  return done;
}

Status WriteRun::sync() {
  RETURN_IF_ERROR(flush());
  return file_->sync();
}

}  // namespace lowbit::ckpt
