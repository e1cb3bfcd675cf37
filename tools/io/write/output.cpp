#include "io/write/output.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "io/open_files.h"
#include "io/text.h"
#include "io/write/partial_name.h"

namespace lowbit::ckpt {
namespace {

/// A quarter of what the process may have open, since the sources are open too.
size_t max_open_outputs() { return part_of_open_files(4, 1, 200); }

constexpr uint64_t kBegin = 32u << 20;  // bytes that are written before the disk is told to begin

}  // namespace

class OutputFile::Handle {
 public:
  explicit Handle(int fd) : fd(fd) {}
  ~Handle() { ::close(fd); }
  const int fd;
};

OutputFile::~OutputFile() {
  const std::lock_guard held(pool_->lock);
  pool_->open.remove(this);
}

void OutputFile::Pool::close_oldest() {
  open.back()->handle_ = nullptr;  // who writes to it at this moment holds it
  open.pop_back();
}

void OutputFile::Pool::close_all() {
  const std::lock_guard held(lock);
  while (!open.empty()) close_oldest();
}

Result<std::shared_ptr<OutputFile::Handle>> OutputFile::handle() {
  const std::lock_guard held(pool_->lock);
  if (handle_ == nullptr) {
    const int flags = O_WRONLY | O_CLOEXEC | (created_ ? 0 : O_CREAT | O_EXCL);
    static const size_t most = max_open_outputs();
    while (pool_->open.size() >= most) pool_->close_oldest();
    int fd = ::open(path_.c_str(), flags, 0666);
    while (fd < 0 && (errno == EMFILE || errno == ENFILE) && !pool_->open.empty()) {
      pool_->close_oldest();
      fd = ::open(path_.c_str(), flags, 0666);
    }
    if (fd < 0) {
      if (errno == ENOSPC || errno == EDQUOT) return unwritten(path_);
      return failed("cannot create " + printable(path_) + ": " + std::strerror(errno));
    }
    created_ = true;
    handle_ = std::make_shared<Handle>(fd);
    pool_->open.push_front(this);
  }
  return handle_;
}

Status OutputFile::write(uint64_t offset, const void* data, uint64_t bytes) {
  iovec all{const_cast<void*>(data), bytes};
  return write(offset, {&all, 1});
}

Status OutputFile::write(uint64_t offset, std::span<iovec> pieces) {
  ASSIGN_OR_RETURN(handle, this->handle());
  while (!pieces.empty()) {
    const ssize_t done = ::pwritev(handle->fd, pieces.data(), static_cast<int>(pieces.size()),
                                   static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return unwritten(path_);
    offset += static_cast<uint64_t>(done);
    begun_ += static_cast<uint64_t>(done);
    auto left = static_cast<uint64_t>(done);
    while (!pieces.empty() && left >= pieces[0].iov_len) {
      left -= pieces[0].iov_len;
      pieces = pieces.subspan(1);
    }
    if (left > 0) {
      pieces[0].iov_base = static_cast<char*>(pieces[0].iov_base) + left;
      pieces[0].iov_len -= left;
    }
  }
#ifdef SYNC_FILE_RANGE_WRITE
  // The disk begins now, while there is more to compute, and `sync` finds less to wait for. A hint:
  // what goes wrong shows in `sync`.
  if (eager_ && begun_ >= kBegin) {
    begun_ = 0;
    ::sync_file_range(handle->fd, 0, 0, SYNC_FILE_RANGE_WRITE);
  }
#endif
  return fine();
}

Status OutputFile::sync() {
  ASSIGN_OR_RETURN(handle, this->handle());
  return ::fsync(handle->fd) == 0 ? fine() : Status(unwritten(path_));
}

void OutputFile::clear() {
  if (!created_) return;  // opening it would make it
  const auto open = handle();
  if (!open.ok()) return;
  // Whoever calls this has an error to tell, which one of its own would hide.
  [[maybe_unused]] const int done = ::ftruncate(open.value()->fd, 0);
}

Status Output::flush() {
  if (!buffer_.empty()) RETURN_IF_ERROR(file_->write(position_, buffer_.data(), buffer_.size()));
  position_ += buffer_.size();
  buffer_.clear();
  return fine();
}

Status Output::write(const void* data, uint64_t bytes) {
  if (file_ == nullptr) {
    if (text_ != nullptr) text_->append(static_cast<const char*>(data), bytes);
    position_ += bytes;
    return fine();
  }
  if (buffer_.size() + bytes > limit_) RETURN_IF_ERROR(flush());
  if (bytes <= limit_) {
    buffer_.append(static_cast<const char*>(data), bytes);
    return fine();
  }
  RETURN_IF_ERROR(file_->write(position_, data, bytes));
  position_ += bytes;
  return fine();
}

Status Output::close() {
  RETURN_IF_ERROR(flush());
  return file_ == nullptr ? fine() : file_->sync();
}

}  // namespace lowbit::ckpt
