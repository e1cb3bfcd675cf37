#include "io/output.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
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

constexpr std::string_view kPartial = ".partial-";
constexpr size_t kMostOpen = 200;
constexpr uint64_t kBegin = 32u << 20;  // bytes that are written before the disk is told to begin

Error full(const std::string& temporary) {
  std::string path = temporary;  // as the user said it
  if (const size_t at = path.rfind(kPartial); at != std::string::npos) {
    path.erase(at, kPartial.size() + 6);
    path.erase(path.find_last_of('/', at - 1) + 1, 1);  // the dot; npos + 1 is 0
  }
  if (errno == ENOSPC || errno == EDQUOT)
    return failed("the disk is full while " + printable(path) +
                  " is written; nothing was left behind");
  if (errno == EFBIG)
    return failed(printable(path) +
                  " grows beyond the largest file that is allowed here; nothing "
                  "was left behind");
  return failed(printable(path) + ": cannot write: " + reason());
}

/// Whether a folder may be replaced: it is empty, or a checkpoint or what is left of one.
bool replaceable(const std::string& path) {
  std::error_code error;
  std::filesystem::directory_iterator entries(path, error);
  if (error) return false;
  bool any = false;
  for (const auto& entry : entries) {
    const std::string name = entry.path().filename();
    if (name.ends_with(".metadata") || name.ends_with(".distcp")) return true;
    any = true;
  }
  return !any;
}

std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

/// Whether `inner` is `outer` or lies in it.
bool inside(const std::string& inner, const std::string& outer) {
  std::error_code error;
  const auto a = std::filesystem::weakly_canonical(inner, error),
             b = std::filesystem::weakly_canonical(outer, error);
  if (error) return false;
  const auto [end, ignored] = std::mismatch(b.begin(), b.end(), a.begin(), a.end());
  return end == b.end();
}

}  // namespace

class OutputFile::Handle {
 public:
  explicit Handle(int fd) : fd(fd) {}
  ~Handle() { ::close(fd); }
  const int fd;
};

std::string partial_name(const std::string& name) {
  return "." + name + std::string(kPartial) + "XXXXXX";
}

bool is_partial(const std::string& path) {
  const size_t end = path.find_last_not_of('/') + 1;
  const std::string whole = path.substr(0, end);
  const std::string name = whole.substr(whole.find_last_of('/') + 1);
  const size_t mark = name.rfind(kPartial);
  return name.starts_with('.') && mark != std::string::npos &&
         name.size() == mark + kPartial.size() + 6;
}

OutputFile::~OutputFile() {
  const std::lock_guard held(pool_->lock);
  pool_->open.remove(this);
}

Result<std::shared_ptr<OutputFile::Handle>> OutputFile::handle() {
  const std::lock_guard held(pool_->lock);
  if (handle_ == nullptr) {
    const int flags = O_WRONLY | O_CLOEXEC | (created_ ? 0 : O_CREAT | O_EXCL);
    const int fd = ::open(path_.c_str(), flags, 0666);
    if (fd < 0) {
      if (errno == ENOSPC || errno == EDQUOT) return full(path_);
      return failed("cannot create " + printable(path_) + ": " + reason());
    }
    created_ = true;
    handle_ = std::make_shared<Handle>(fd);
    if (pool_->open.size() >= kMostOpen) {
      pool_->open.back()->handle_ = nullptr;  // who writes to it at this moment holds it
      pool_->open.pop_back();
    }
    pool_->open.push_front(this);
  }
  return handle_;
}

Status OutputFile::write(uint64_t offset, const void* data, uint64_t bytes) {
  LB_TRY(handle, this->handle());
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done =
        ::pwrite(handle->fd, from, std::min<uint64_t>(bytes, 1u << 30), static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return full(path_);
    from += done;
    offset += static_cast<uint64_t>(done);
    bytes -= static_cast<uint64_t>(done);
    begun_ += static_cast<uint64_t>(done);
  }
#ifdef SYNC_FILE_RANGE_WRITE
  // The disk begins now, while there is more to compute, and `sync` finds less to wait for. A hint:
  // what goes wrong shows in `sync`.
  if (begun_ >= kBegin) {
    begun_ = 0;
    ::sync_file_range(handle->fd, 0, 0, SYNC_FILE_RANGE_WRITE);
  }
#endif
  return fine();
}

Status OutputFile::sync() {
  LB_TRY(handle, this->handle());
  return ::fsync(handle->fd) == 0 ? fine() : Status(full(path_));
}

Status Output::flush() {
  if (!buffer_.empty()) LB_CHECK(file_->write(position_, buffer_.data(), buffer_.size()));
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
  if (buffer_.size() + bytes > most_) LB_CHECK(flush());
  if (bytes <= most_) {
    buffer_.append(static_cast<const char*>(data), bytes);
    return fine();
  }
  LB_CHECK(file_->write(position_, data, bytes));
  position_ += bytes;
  return fine();
}

Status Output::close() {
  LB_CHECK(flush());
  return file_->sync();
}

Status NewDirectory::check(const std::string& given, bool replace,
                           const std::vector<std::string>& sources) {
  const std::string path = without_slashes(given);
  const std::string parent = parent_of(path), name = path.substr(parent.size());
  if (name.empty() || name == "." || name == "..")
    return Error{Exit::kUsage, "'" + printable(given) + "' does not name a folder to write"};
  struct stat info;
  const bool exists = ::lstat(path.c_str(), &info) == 0;
  if (exists && !replace)
    return Error{Exit::kUsage, printable(path) + " exists; --force replaces it"};
  if (exists && !S_ISDIR(info.st_mode))
    return Error{Exit::kUsage, printable(path) + " exists and is not a folder"};
  if (exists && !replaceable(path))
    return Error{Exit::kUsage, printable(path) +
                                   " exists and holds something else than a checkpoint, which "
                                   "--force does not replace"};
  for (const std::string& source : sources) {
    if (exists && inside(source, path))
      return Error{Exit::kUsage, printable(path) + " cannot be replaced: the source " +
                                     printable(source) + " is or lies in it"};
  }
  if (!parent.empty() && ::stat(parent.c_str(), &info) != 0 && errno == ENOENT)
    return failed("cannot write " + printable(path) + ": there is no folder " + printable(parent));
  return fine();
}

Result<std::shared_ptr<NewDirectory>> NewDirectory::create(
    const std::string& given, bool replace, const std::vector<std::string>& sources) {
  LB_CHECK(check(given, replace, sources));
  const std::string path = without_slashes(given);
  const std::string parent = parent_of(path), name = path.substr(parent.size());
  struct stat info;
  const bool exists = ::lstat(path.c_str(), &info) == 0;
  std::string temporary = parent + partial_name(name);
  if (::mkdtemp(temporary.data()) == nullptr)
    return errno == ENOSPC || errno == EDQUOT
               ? full(path)
               : failed("cannot make a folder beside " + printable(path) + ": " + reason());
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

Result<std::shared_ptr<OutputFile>> NewDirectory::part(const std::string& name) {
  std::shared_ptr<OutputFile> file(new OutputFile(pool_, temporary_ + "/" + name));
  LB_TRY(handle, file->handle());
  return file;
}

Result<std::shared_ptr<Output>> NewDirectory::file(const std::string& name) {
  LB_TRY(part, this->part(name));
  return std::make_shared<Output>(std::move(part), 0);
}

Status NewDirectory::take_place() {
  const unsigned flags = replace_ ? RENAME_EXCHANGE : RENAME_NOREPLACE;
  const std::string what = "cannot rename " + printable(temporary_) + " to " + printable(path_);
  const auto exists = [this] {
    return Error{Exit::kUsage,
                 printable(path_) + " came into being meanwhile; --force replaces it"};
  };
  if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), flags) == 0) {
    if (replace_) old_ = temporary_;
    return fine();
  }
  if (errno == EEXIST) return exists();
  if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP)
    return failed(what + ": " + reason());
  // A file system without these flags (NFS, some FUSE): rename() itself never replaces a folder
  // that has something in it.
  if (replace_) {
    old_ = temporary_ + ".old";
    if (::rename(path_.c_str(), old_.c_str()) != 0) {
      const std::string why = reason();
      old_.clear();
      return failed("cannot move the old " + printable(path_) + " aside: " + why);
    }
  }
  if (::rename(temporary_.c_str(), path_.c_str()) == 0) return fine();
  const int why = errno;
  if (replace_ && ::rename(old_.c_str(), path_.c_str()) == 0) old_.clear();
  if (why == EEXIST || why == ENOTEMPTY) return exists();
  errno = why;
  return failed(what + ": " + reason());
}

Status NewDirectory::commit() {
  LB_CHECK(sync_folder(temporary_));
  LB_CHECK(take_place());
  committed_ = true;
  LB_CHECK(sync_folder(parent_of(path_)));
  std::error_code ignored;
  if (!old_.empty()) std::filesystem::remove_all(old_, ignored);
  return fine();
}

}  // namespace lowbit::ckpt
