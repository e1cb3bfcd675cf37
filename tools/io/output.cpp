#include "io/output.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "io/text.h"

namespace lowbit::ckpt {
namespace {

std::string reason() { return std::strerror(errno); }

/// The folder that holds `path`, with its last '/'; empty for the current one.
std::string parent_of(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

Status sync_folder(const std::string& path) {
  const int fd = ::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return failed("cannot open " + printable(path) + ": " + reason());
  const bool done = ::fsync(fd) == 0;
  const std::string why = reason();
  ::close(fd);
  return done ? fine() : Status(failed("cannot sync " + printable(path) + ": " + why));
}

}  // namespace

Output::~Output() {
  if (fd_ >= 0) ::close(fd_);
}

Status Output::put(const char* from, uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t done = ::write(fd_, from, std::min<uint64_t>(bytes, 1u << 30));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return failed(printable(name_) + ": cannot write: " + reason());
    from += done;
    bytes -= static_cast<uint64_t>(done);
    position_ += static_cast<uint64_t>(done);
  }
  return fine();
}

Status Output::flush() {
  const std::string full = std::move(buffer_);
  buffer_.clear();
  return put(full.data(), full.size());
}

Status Output::write(const void* data, uint64_t bytes) {
  constexpr uint64_t kBuffer = 1u << 18;  // collects headers; tensor bytes go past it
  if (buffer_.size() + bytes > kBuffer) LB_CHECK(flush());
  if (bytes > kBuffer) return put(static_cast<const char*>(data), bytes);
  buffer_.append(static_cast<const char*>(data), bytes);
  return fine();
}

Status Output::close() {
  LB_CHECK(flush());
  const bool done = ::fsync(fd_) == 0;
  const std::string why = reason();
  ::close(fd_);
  fd_ = -1;
  return done ? fine() : Status(failed(printable(name_) + ": cannot sync: " + why));
}

Result<std::shared_ptr<NewDirectory>> NewDirectory::create(const std::string& given, bool replace) {
  std::string path = given;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const std::string parent = parent_of(path), name = path.substr(parent.size());
  if (name.empty() || name == "." || name == "..")
    return Error{Exit::kUsage, "'" + printable(given) + "' does not name a folder to write"};
  struct stat info;
  const bool exists = ::lstat(path.c_str(), &info) == 0;
  if (exists && !replace)
    return Error{Exit::kUsage, printable(path) + " exists; --force replaces it"};
  if (exists && !S_ISDIR(info.st_mode))
    return Error{Exit::kUsage, printable(path) + " exists and is not a folder"};
  std::string temporary = parent + "." + name + ".partial-XXXXXX";
  if (::mkdtemp(temporary.data()) == nullptr)
    return failed("cannot make a folder beside " + printable(path) + ": " + reason());
  // mkdtemp's folder is private; a checkpoint's has the mode that mkdir would give.
  const mode_t mask = ::umask(0);
  ::umask(mask);
  if (::chmod(temporary.c_str(), 0777 & ~mask) != 0)
    return failed("cannot set the mode of " + printable(temporary) + ": " + reason());
  return std::shared_ptr<NewDirectory>(new NewDirectory(path, temporary, exists));
}

NewDirectory::~NewDirectory() {
  std::error_code ignored;
  if (!committed_) std::filesystem::remove_all(temporary_, ignored);
}

Result<std::shared_ptr<Output>> NewDirectory::file(const std::string& name) {
  const std::string path = temporary_ + "/" + name;
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) return failed("cannot create " + printable(path) + ": " + reason());
  return std::shared_ptr<Output>(new Output(fd, path));
}

Status NewDirectory::commit() {
  LB_CHECK(sync_folder(temporary_));
  const unsigned flags = replace_ ? RENAME_EXCHANGE : RENAME_NOREPLACE;
  if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), flags) != 0) {
    if (errno == EEXIST)
      return Error{Exit::kUsage,
                   printable(path_) + " came into being meanwhile; --force replaces it"};
    if (errno != EINVAL || replace_) {
      return failed("cannot rename " + printable(temporary_) + " to " + printable(path_) + ": " +
                    reason() +
                    (errno == EINVAL ? " (this file system cannot exchange two folders: remove the "
                                       "old one first)"
                                     : ""));
    }
    // A file system without RENAME_NOREPLACE: rename() itself never replaces a folder that has
    // something in it.
    if (::rename(temporary_.c_str(), path_.c_str()) != 0)
      return failed("cannot rename " + printable(temporary_) + " to " + printable(path_) + ": " +
                    reason());
  }
  committed_ = true;
  LB_CHECK(sync_folder(parent_of(path_)));
  std::error_code ignored;
  if (replace_)
    std::filesystem::remove_all(temporary_, ignored);  // the old one, after the exchange
  return fine();
}

}  // namespace lowbit::ckpt
