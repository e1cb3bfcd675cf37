#include "io/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

namespace lowbit::ckpt {
namespace {

std::string reason() { return std::strerror(errno); }

bool plain(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

Status sync_folder(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return failed("cannot open " + path + ": " + reason());
  const bool done = ::fsync(fd) == 0;
  ::close(fd);
  return done ? fine() : Status(failed("cannot sync " + path + ": " + reason()));
}

}  // namespace

File::~File() { ::close(fd_); }

Result<std::shared_ptr<File>> File::of_bytes(std::string_view bytes, std::string name) {
  const int fd = ::memfd_create("lowbit-ckpt", MFD_CLOEXEC);
  if (fd < 0) return failed(name + ": cannot make a file in memory: " + reason());
  std::shared_ptr<File> file(new File(fd, bytes.size(), std::move(name)));
  if (::write(fd, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()))
    return failed(file->name() + ": cannot write: " + reason());
  return file;
}

Status File::read(uint64_t offset, void* out, uint64_t bytes) const {
  if (offset > size_ || bytes > size_ - offset)
    return bad(name_ + ": bytes " + std::to_string(offset) + ".." + std::to_string(offset + bytes) +
               " of a file of " + std::to_string(size_));
  char* to = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t got =
        ::pread(fd_, to, std::min<uint64_t>(bytes, 1u << 30), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return failed(name_ + ": cannot read: " + reason());
    if (got == 0) return bad(name_ + ": became shorter while it was read");
    to += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
  return fine();
}

Directory::~Directory() { ::close(fd_); }

Result<std::shared_ptr<Directory>> Directory::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return bad("cannot open the folder " + path + ": " + reason());
  return std::shared_ptr<Directory>(new Directory(fd, path));
}

Result<std::vector<std::string>> Directory::list() const {
  const int again = ::openat(fd_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* dir = again < 0 ? nullptr : ::fdopendir(again);
  if (dir == nullptr) return failed("cannot list " + path_ + ": " + reason());
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(dir)) names.emplace_back(entry->d_name);
  ::closedir(dir);
  std::sort(names.begin(), names.end());
  return names;
}

bool Directory::has(const std::string& name) const {
  struct stat info;
  return plain(name) && ::fstatat(fd_, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0;
}

Result<std::shared_ptr<File>> Directory::file(const std::string& name) const {
  if (!plain(name))
    return bad(path_ + ": the file name " + printable(name) + " leads out of the folder");
  const int fd = ::openat(fd_, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0 && errno == ELOOP)
    return bad(path_ + "/" + printable(name) + ": is a link, which is not followed");
  if (fd < 0) return bad(path_ + "/" + printable(name) + ": cannot be opened: " + reason());
  struct stat info;
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    return bad(path_ + "/" + printable(name) + ": is not a regular file");
  }
  return std::shared_ptr<File>(new File(fd, static_cast<uint64_t>(info.st_size), printable(name)));
}

Result<std::string> Directory::content(const std::string& name, uint64_t limit) const {
  LB_TRY(f, file(name));
  if (f->size() > limit)
    return bad(f->name() + ": has " + std::to_string(f->size()) +
               " bytes, more than the limit of " + std::to_string(limit));
  std::string bytes(f->size(), '\0');
  LB_CHECK(f->read(0, bytes.data(), bytes.size()));
  return bytes;
}

Output::~Output() {
  if (fd_ >= 0) ::close(fd_);
}

Status Output::flush() {
  const char* from = buffer_.data();
  size_t left = buffer_.size();
  while (left > 0) {
    const ssize_t put = ::write(fd_, from, left);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return failed(name_ + ": cannot write: " + reason());
    from += put;
    left -= static_cast<size_t>(put);
  }
  position_ += buffer_.size();
  buffer_.clear();
  return fine();
}

Status Output::write(const void* data, uint64_t bytes) {
  constexpr uint64_t kBuffer = 1u << 20;
  if (buffer_.size() + bytes > kBuffer) LB_CHECK(flush());
  if (bytes <= kBuffer) {
    buffer_.append(static_cast<const char*>(data), bytes);
    return fine();
  }
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t put = ::write(fd_, from, std::min<uint64_t>(bytes, 1u << 30));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return failed(name_ + ": cannot write: " + reason());
    from += put;
    bytes -= static_cast<uint64_t>(put);
    position_ += static_cast<uint64_t>(put);
  }
  return fine();
}

Status Output::close() {
  LB_CHECK(flush());
  const bool done = ::fsync(fd_) == 0;
  const std::string why = reason();
  ::close(fd_);
  fd_ = -1;
  return done ? fine() : Status(failed(name_ + ": cannot sync: " + why));
}

Result<std::shared_ptr<NewDirectory>> NewDirectory::create(const std::string& given, bool replace) {
  std::string path = given;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  struct stat info;
  const bool exists = ::lstat(path.c_str(), &info) == 0;
  if (exists && !replace) return Error{Exit::kUsage, path + " exists; --force replaces it"};
  if (exists && !S_ISDIR(info.st_mode))
    return Error{Exit::kUsage, path + " exists and is not a folder"};
  const size_t slash = path.find_last_of('/');
  const std::string parent = slash == std::string::npos ? "" : path.substr(0, slash + 1);
  std::string temporary = parent + "." + path.substr(parent.size()) + ".partial-XXXXXX";
  if (::mkdtemp(temporary.data()) == nullptr)
    return failed("cannot make a folder beside " + path + ": " + reason());
  ::chmod(temporary.c_str(), 0755);
  return std::shared_ptr<NewDirectory>(new NewDirectory(path, temporary, exists));
}

NewDirectory::~NewDirectory() {
  std::error_code ignored;
  if (!committed_) std::filesystem::remove_all(temporary_, ignored);
}

Result<std::shared_ptr<Output>> NewDirectory::file(const std::string& name) {
  const std::string path = temporary_ + "/" + name;
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) return failed("cannot create " + path + ": " + reason());
  return std::shared_ptr<Output>(new Output(fd, path));
}

Status NewDirectory::commit() {
  LB_CHECK(sync_folder(temporary_));
  const unsigned flags = replace_ ? RENAME_EXCHANGE : RENAME_NOREPLACE;
  if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), flags) != 0) {
    return failed("cannot rename " + temporary_ + " to " + path_ + ": " + reason());
  }
  committed_ = true;
  const size_t slash = path_.find_last_of('/');
  LB_CHECK(sync_folder(slash == std::string::npos ? "." : path_.substr(0, slash + 1)));
  std::error_code ignored;
  if (replace_)
    std::filesystem::remove_all(temporary_, ignored);  // the old one, after the exchange
  return fine();
}

std::string printable(const std::string& name) {
  std::string out;
  for (const char c : name) {
    const auto b = static_cast<unsigned char>(c);
    if (b >= 0x20 && b < 0x7f) {
      out += c;
    } else {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\x%02x", b);
      out += escaped;
    }
  }
  return out;
}

}  // namespace lowbit::ckpt
