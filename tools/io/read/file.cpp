#include "io/read/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "io/open_files.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr size_t kMaxOpen = 64;
// Made files that stay: of a tensor cut along columns, one for each rank has a part of every row,
// and to make one again is to decompress all of it. Some stay whatever their size.
constexpr size_t kMaxMade = 256, kMinMade = 32;
size_t max_made() {
  static const size_t most = part_of_open_files(8, kMinMade, kMaxMade);
  return most;
}
constexpr uint64_t kMaxMadeBytes = 1ull << 30;

FileIdentity identity_of(const struct stat& info) {
  return {info.st_dev,         info.st_ino,          static_cast<uint64_t>(info.st_size),
          info.st_mtim.tv_sec, info.st_mtim.tv_nsec, {}};
}

class LocalFile : public File {
 public:
  LocalFile(int fd, FileIdentity identity, std::string name)
      : File(std::move(identity), std::move(name)), fd_(fd) {}
  ~LocalFile() override { ::close(fd_); }
  int descriptor() const override { return fd_; }

 private:
  Status fetch(uint64_t offset, char* to, uint64_t bytes) const override {
    while (bytes > 0) {
      const ssize_t got =
          ::pread(fd_, to, std::min<uint64_t>(bytes, 1u << 30), static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return failed(name() + ": cannot read: " + reason());
      if (got == 0) return damaged(name() + ": became shorter while it was read");
      to += got;
      offset += static_cast<uint64_t>(got);
      bytes -= static_cast<uint64_t>(got);
    }
    return fine();
  }
  int fd_;
};

class LocalDirectory : public Directory {
 public:
  LocalDirectory(int fd, std::string path) : Directory(std::move(path)), fd_(fd) {}
  ~LocalDirectory() override { ::close(fd_); }
  Result<std::vector<std::string>> list() const override;
  bool has(const std::string& name) const override;
  Result<std::shared_ptr<File>> file(const std::string& name) const override;
  Result<std::shared_ptr<Directory>> folder(const std::string& name) const override;

 private:
  Error leads_out(const std::string& name) const {
    return bad(printable(path_) + ": the file name '" + printable(name) +
               "' leads out of the folder");
  }
  int fd_;
};

}  // namespace

bool is_entry_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

Error not_opened(const std::string& what) {
  const int why = errno;
  for (const int refusal : {EACCES, EPERM, EMFILE, ENFILE, ENOMEM, EIO}) {
    if (why == refusal) return failed(what + ": " + std::strerror(why));
  }
  return bad(what + ": " + std::strerror(why));
}

Result<std::shared_ptr<File>> File::of_bytes(std::string_view bytes, std::string name) {
  const int fd = ::memfd_create("lowbit-ckpt", MFD_CLOEXEC);
  if (fd < 0) return failed(name + ": cannot make a file in memory: " + reason());
  FileIdentity identity;
  identity.size = bytes.size();
  const auto file = std::make_shared<LocalFile>(fd, identity, std::move(name));
  if (::write(fd, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size()))
    return failed(file->name() + ": cannot write: " + reason());
  return std::shared_ptr<File>(file);
}

Status File::read(uint64_t offset, void* out, uint64_t bytes) const {
  if (offset > size() || bytes > size() - offset)
    return bad(name_ + ": wants " + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
               " of a file of " + std::to_string(size()));
  return fetch(offset, static_cast<char*>(out), bytes);
}

Result<Scratch> Scratch::create() {
  const char* given = std::getenv("TMPDIR");
  std::string folder = given != nullptr && given[0] != '\0' ? given : "/tmp";
  int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) {  // a file system that cannot make a file without a name
    std::string path = folder + "/lowbit-ckpt-XXXXXX";
    fd = ::mkostemp(path.data(), O_CLOEXEC);
    if (fd >= 0) ::unlink(path.c_str());
  }
  if (fd < 0)
    return failed("cannot make a temporary file in " + printable(folder) +
                  " (TMPDIR): " + reason());
  return Scratch(fd, std::move(folder));
}

Scratch::Scratch(Scratch&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), folder_(std::move(other.folder_)), size_(other.size_) {}

Scratch::~Scratch() {
  if (fd_ >= 0) ::close(fd_);
}

Status Scratch::append(const void* data, uint64_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = ::write(fd_, from, bytes);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0)
      return failed("cannot write a temporary file in " + printable(folder_) +
                    " (TMPDIR): " + reason());
    from += done;
    bytes -= static_cast<uint64_t>(done);
    size_ += static_cast<uint64_t>(done);
  }
  return fine();
}

std::shared_ptr<File> Scratch::finish(std::string name) {
  FileIdentity identity;
  identity.size = size_;
  return std::make_shared<LocalFile>(std::exchange(fd_, -1), identity, std::move(name));
}

Result<std::shared_ptr<Directory>> Directory::local(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return not_opened("cannot open the folder " + printable(path));
  return std::shared_ptr<Directory>(std::make_shared<LocalDirectory>(fd, path));
}

Result<std::vector<std::string>> LocalDirectory::list() const {
  const int again = ::openat(fd_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* dir = again < 0 ? nullptr : ::fdopendir(again);
  if (dir == nullptr) {
    if (again >= 0) ::close(again);
    return failed("cannot list " + printable(path_) + ": " + reason());
  }
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(dir)) names.emplace_back(entry->d_name);
  ::closedir(dir);
  std::ranges::sort(names);
  return names;
}

bool LocalDirectory::has(const std::string& name) const {
  struct stat info;
  return is_entry_name(name) && ::fstatat(fd_, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0;
}

Result<std::shared_ptr<File>> LocalDirectory::file(const std::string& name) const {
  if (!is_entry_name(name)) return leads_out(name);
  const std::string what = shown(name);
  // O_NONBLOCK: a pipe of that name must not hang us before it is found to be no regular file.
  const int fd = ::openat(fd_, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0 && errno == ELOOP) return bad(what + ": is a link, which is not followed");
  if (fd < 0) return not_opened(what + ": cannot be opened");
  struct stat info;
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    return bad(what + ": is not a regular file");
  }
  return std::shared_ptr<File>(std::make_shared<LocalFile>(fd, identity_of(info), what));
}

Result<std::shared_ptr<Directory>> LocalDirectory::folder(const std::string& name) const {
  if (!is_entry_name(name)) return leads_out(name);
  const std::string path = path_ + "/" + name, what = shown(name);
  const int fd = ::openat(fd_, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  struct stat info;
  if (fd < 0 && ::fstatat(fd_, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 &&
      S_ISLNK(info.st_mode))
    return bad(what + ": is a link, which is not followed");
  if (fd < 0) return not_opened("cannot open the folder " + what);
  return std::shared_ptr<Directory>(std::make_shared<LocalDirectory>(fd, path));
}

std::string Directory::shown(const std::string& name) const {
  return printable(path_ + (path_.ends_with('/') ? "" : "/") + name);
}

Result<std::string> Directory::content(const std::string& name, uint64_t limit) const {
  ASSIGN_OR_RETURN(f, file(name));
  if (f->size() > limit)
    return too_large(f->name() + ": has " + std::to_string(f->size()) +
                     " bytes, more than the limit of " + std::to_string(limit));
  std::string bytes(f->size(), '\0');
  RETURN_IF_ERROR(f->read(0, bytes.data(), bytes.size()));
  return bytes;
}

Result<std::shared_ptr<File>> FileSet::find(const std::string& name) {
  const size_t slash = name.rfind('/');
  if (slash == std::string::npos) return folder_->file(name);
  if (inner_ == nullptr || name.compare(0, slash, inner_name_) != 0) {
    std::shared_ptr<Directory> at = folder_;
    for (size_t begin = 0; begin <= slash;) {
      const size_t end = name.find('/', begin);
      ASSIGN_OR_RETURN(next, at->folder(name.substr(begin, end - begin)));
      at = std::move(next);
      begin = end + 1;
    }
    inner_ = std::move(at);
    inner_name_ = name.substr(0, slash);
  }
  return inner_->file(name.substr(slash + 1));
}

void FileSet::remember(const std::string& name, const File& file) {
  files_.push_back({name, file.identity(), nullptr, 0, nullptr});
}

Status FileSet::add(const std::string& name) {
  ASSIGN_OR_RETURN(file, folder_->file(name));
  const std::lock_guard held(lock_);
  remember(name, *file);
  return fine();
}

Status FileSet::add_inner(const std::string& name) {
  const std::lock_guard held(lock_);
  ASSIGN_OR_RETURN(file, find(name));
  remember(name, *file);
  return fine();
}

uint32_t FileSet::add_made(std::string name, Make make) {
  const std::lock_guard held(lock_);
  files_.push_back({std::move(name), {}, nullptr, 0, std::move(make)});
  return static_cast<uint32_t>(files_.size() - 1);
}

size_t FileSet::count() const {
  const std::lock_guard held(lock_);
  return files_.size();
}

uint64_t FileSet::size(uint32_t number) const {
  const std::lock_guard held(lock_);
  return files_[number].identity.size;
}

FileIdentity FileSet::identity(uint32_t number) const {
  const std::lock_guard held(lock_);
  return files_[number].identity;
}

std::string FileSet::name(uint32_t number) const {
  const std::lock_guard held(lock_);
  return printable(files_[number].name);
}

std::string FileSet::shown(uint32_t number) const {
  const std::lock_guard held(lock_);
  return folder_->shown(files_[number].name);
}

void FileSet::keep(uint32_t number, std::shared_ptr<const File> file) {
  const bool is_made = files_[number].make != nullptr;
  std::vector<uint32_t>& held = is_made ? made_ : open_;
  if (is_made) made_bytes_ += file->size();
  const auto full = [&] {
    if (!is_made) return held.size() >= kMaxOpen;
    return held.size() >= max_made() || (held.size() >= kMinMade && made_bytes_ > kMaxMadeBytes);
  };
  while (full()) {
    const auto oldest = std::ranges::min_element(
        held, [&](uint32_t a, uint32_t b) { return files_[a].used < files_[b].used; });
    if (is_made) made_bytes_ -= files_[*oldest].file->size();
    files_[*oldest].file = nullptr;
    held.erase(oldest);
  }
  held.push_back(number);
  files_[number].file = std::move(file);
}

Result<std::shared_ptr<const File>> FileSet::open(uint32_t number) {
  Make make;
  {
    const std::lock_guard held(lock_);
    Member& member = files_[number];
    member.used = ++clock_;
    if (member.file != nullptr) return member.file;
    if (member.make == nullptr) {
      ASSIGN_OR_RETURN(file, find(member.name));
      if (file->identity() != member.identity)
        return bad(folder_->shown(member.name) + ": changed while it was read");
      keep(number, file);
      return std::shared_ptr<const File>(std::move(file));
    }
    make = member.make;
  }
  // Without the lock: others continue meanwhile. Where two make the same, the second's is dropped.
  ASSIGN_OR_RETURN(made, make());
  const std::lock_guard held(lock_);
  if (files_[number].file == nullptr) keep(number, std::move(made));
  return files_[number].file;
}

Status FileSet::check_unchanged() {
  const std::lock_guard held(lock_);
  RETURN_IF_ERROR(folder_->refresh());
  inner_ = nullptr;
  for (const Member& member : files_) {
    if (member.make != nullptr) continue;
    ASSIGN_OR_RETURN(file, find(member.name));
    if (file->identity() != member.identity)
      return bad(folder_->shown(member.name) + ": changed while it was read");
  }
  return fine();
}

}  // namespace lowbit::ckpt
