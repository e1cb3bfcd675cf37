#include "io/write/shared_directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include "io/read/file.h"
#include "io/read/open.h"
#include "io/read/store.h"
#include "io/text.h"
#include "io/write/checkpoint_folder.h"
#include "io/write/new_directory.h"
#include "io/write/partial_name.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kMaxPart = 1ull << 30;  // bytes that a part says of itself

bool there(const std::string& path) {
  struct stat info;
  return ::lstat(path.c_str(), &info) == 0;
}

constexpr const char* kAgain = "remove that folder and start every part again";

/// Whether a folder has what a part says of itself.
Result<bool> has_parts(const std::string& path) {
  ASSIGN_OR_RETURN(folder, open_folder(path));
  ASSIGN_OR_RETURN(names, folder->list());
  return std::ranges::any_of(names, [](const std::string& name) {
    // Not one that is being written: its plan was there when that began.
    return name.starts_with("part-") && name.find('.') == std::string::npos;
  });
}

/// Removes a folder that other parts may be removing too, of which one may stop where another was
/// faster.
void remove_together(const std::string& path) {
  std::error_code ignored;
  for (int attempt = 0; attempt < 16 && there(path); ++attempt)
    std::filesystem::remove_all(path, ignored);
}

/// Makes a folder, where there is none.
Status make_folder(const std::string& path, mode_t mode) {
  struct stat info;
  if (::mkdir(path.c_str(), mode) == 0) return fine();
  if (errno == ENOSPC || errno == EDQUOT) return unwritten(path);
  const std::string why = reason();
  if (::lstat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return fine();
  return failed("cannot make " + printable(path) + ": " + why);
}

}  // namespace

Result<std::shared_ptr<SharedDirectory>> SharedDirectory::open(
    const std::string& given, const std::string& plan, const std::vector<std::string>& sources) {
  RETURN_IF_ERROR(check_no_url(given));
  std::string path = given;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const std::string parent = parent_of(path);
  std::shared_ptr<SharedDirectory> out(new SharedDirectory(
      path, parent + partial_stem(path.substr(parent.size())) + std::string(kPieces)));
  // Between its name and the end of the program that gave it, a part that is late finds both.
  if (there(path) && there(out->folder_ + "/plan") && !there(out->checkpoint_)) {
    RETURN_IF_ERROR(out->check_plan(plan));
    out->published_ = true;
    return out;
  }
  RETURN_IF_ERROR(NewDirectory::check_sources(path, sources));
  if (there(path)) {
    remove_together(out->removed());
    return usage(
        printable(path) +
        " exists: if all parts of this reshard have run, it is complete (lowbit-ckpt verify "
        "tells). Parts replace nothing: to write it again, remove it first");
  }
  RETURN_IF_ERROR(NewDirectory::check(path, false, NewDirectory::Kind::kDcp, sources));
  RETURN_IF_ERROR(out->begin(plan, sources));
  return out;
}

Status SharedDirectory::begin(const std::string& plan, const std::vector<std::string>& sources) {
  const mode_t mode = 0777 & mode_of(sources);  // no more open than what is in it was
  RETURN_IF_ERROR(make_folder(folder_, mode));
  // In this order: a plan comes before its parts, and goes with them.
  ASSIGN_OR_RETURN(parts, has_parts(folder_));
  const bool planned = there(folder_ + "/plan");
  if (planned ? !there(checkpoint_) : parts) {
    const bool late = there(path_);  // the other parts have published meanwhile
    if (late && !planned)
      return usage(printable(path_) + " was created by another program during the write");
    if (!late)
      return usage(printable(folder_) + ": its parts are of an older reshard, whose " +
                   (planned ? "checkpoint" : "plan") + " is gone: " + kAgain);
  }
  if (!planned) {
    RETURN_IF_ERROR(make_folder(checkpoint_, mode));
    RETURN_IF_ERROR(put("plan", plan, false));
  }
  return check_plan(plan);
}

Status SharedDirectory::check_plan(const std::string& plan) const {
  ASSIGN_OR_RETURN(folder, open_folder(folder_));
  ASSIGN_OR_RETURN(known, folder->content("plan", kMaxPart));
  if (known == plan) return fine();
  return usage(
      printable(folder_) +
      ": its parts are of another plan: another source, mesh, selection, number of parts or "
      "version of lowbit-ckpt, or the source has changed. Give all parts the same "
      "arguments, or " +
      kAgain);
}

SharedDirectory::~SharedDirectory() {
  pool_->close_all();
  for (const NewPart& part : files_) ::unlink(part.temporary.c_str());
}

bool SharedDirectory::see_published() {
  published_ = published_ || (!there(checkpoint_) && there(path_));
  return published_;
}

Result<std::optional<std::string>> SharedDirectory::part(uint64_t number) {
  const std::string name = "part-" + std::to_string(number);
  if (!there(folder_ + "/" + name)) {
    see_published();
    return std::optional<std::string>();
  }
  const auto folder = open_folder(folder_);
  const auto said = folder.ok() ? folder.value()->content(name, kMaxPart) : folder.error();
  if (said.ok()) return std::optional<std::string>(said.value());
  if (see_published()) return std::optional<std::string>();
  return said.error();
}

Result<SharedDirectory::NewPart> SharedDirectory::make(const std::string& name) {
  NewPart part{name, folder_ + "/" + name + ".XXXXXX", nullptr};
  const int fd = ::mkostemp(part.temporary.data(), O_CLOEXEC);
  if (fd < 0)
    return errno == ENOSPC || errno == EDQUOT
               ? unwritten(part.temporary)
               : failed("cannot make a file in " + printable(folder_) + ": " + reason());
  // mkostemp's file is private; it becomes as open as the folder, which knows umask and source.
  struct stat info;
  const bool opened = ::stat(folder_.c_str(), &info) == 0 && ::fchmod(fd, info.st_mode & 0666) == 0;
  ::close(fd);
  if (!opened) {
    const std::string why = reason();
    ::unlink(part.temporary.c_str());
    return failed("cannot set the mode of " + printable(part.temporary) + ": " + why);
  }
  part.file.reset(new OutputFile(pool_, part.temporary));
  part.file->created_ = true;
  return part;
}

Result<std::shared_ptr<OutputFile>> SharedDirectory::file(const std::string& name) {
  ASSIGN_OR_RETURN(part, make(name));
  files_.push_back(part);
  return part.file;
}

Status SharedDirectory::put(const std::string& name, const std::string& content, bool replace) {
  ASSIGN_OR_RETURN(part, make(name.substr(name.rfind('/') + 1)));
  RETURN_IF_ERROR(part.file->write(0, content.data(), content.size()));
  RETURN_IF_ERROR(part.file->sync());
  const std::string target = folder_ + "/" + name;
  bool done = replace ? ::rename(part.temporary.c_str(), target.c_str()) == 0
                      : ::link(part.temporary.c_str(), target.c_str()) == 0;
  if (!done && !replace &&
      (lacks_call(errno) || errno == EPERM))  // a file system without links (FUSE, SMB)
    done = rename_new(part.temporary, target) == 0;
  const int why = errno;
  if (!replace || !done) ::unlink(part.temporary.c_str());
  if (done || (!replace && why == EEXIST)) return fine();
  errno = why;
  return failed("cannot write " + printable(target) + ": " + reason());
}

Status SharedDirectory::complete(uint64_t number, const std::string& said) {
  for (const NewPart& part : files_) RETURN_IF_ERROR(part.file->sync());
  pool_->close_all();
  while (!files_.empty()) {
    const NewPart& part = files_.back();
    if (::rename(part.temporary.c_str(), (checkpoint_ + "/" + part.name).c_str()) != 0) {
      // The same part has run twice, and the other run was faster.
      const std::string why = reason();
      if (see_published()) return fine();
      return failed("cannot rename " + printable(part.temporary) + ": " + why);
    }
    files_.pop_back();
  }
  RETURN_IF_ERROR(sync_folder(checkpoint_));
  RETURN_IF_ERROR(put("part-" + std::to_string(number), said, true));
  return sync_folder(folder_);
}

Status SharedDirectory::check_file(const std::string& name, uint64_t bytes) {
  // Opened, since a network's file system may report an older size of a file that is not opened.
  const int fd =
      ::open((checkpoint_ + "/" + name).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  const std::string why = reason();
  struct stat info;
  const bool known = fd >= 0 && ::fstat(fd, &info) == 0;
  if (fd >= 0) ::close(fd);
  if (known && S_ISREG(info.st_mode) && static_cast<uint64_t>(info.st_size) >= bytes) return fine();
  if (see_published()) return fine();
  return incomplete(known ? "checkpoint/" + name + " is shorter than its part has made it"
                          : "checkpoint/" + name + ": " + why);
}

Error SharedDirectory::incomplete(const std::string& what) const {
  return usage(printable(folder_) +
               " is not complete, though every part says so: " + printable(what) + "; " + kAgain);
}

Status SharedDirectory::add(const std::string& name, const std::function<Status(Output&)>& write) {
  std::string content;
  Output out(&content);
  RETURN_IF_ERROR(write(out));
  if (published_) return fine();
  const Status done = put("checkpoint/" + name, content, true);
  return !done.ok() && see_published() ? fine() : done;
}

Status SharedDirectory::publish() {
  if (!published_) {
    const Status synced = sync_folder(checkpoint_);
    if (!synced.ok() && there(checkpoint_)) return synced.error();
    // Never over anything: rename() itself replaces no folder that has something in it.
    int done =
        ::renameat2(AT_FDCWD, checkpoint_.c_str(), AT_FDCWD, path_.c_str(), RENAME_NOREPLACE);
    if (done != 0 && lacks_call(errno)) done = ::rename(checkpoint_.c_str(), path_.c_str());
    if (done != 0) {
      const int why = errno;
      if (why == EEXIST || why == ENOTEMPTY)
        return usage(printable(path_) +
                     " was created by another program during the write; the parts lie in " +
                     printable(folder_));
      if (why != ENOENT || !there(path_)) {
        errno = why;
        return failed("cannot rename " + printable(checkpoint_) + " to " + printable(path_) + ": " +
                      reason());
      }
    } else {
      RETURN_IF_ERROR(sync_folder(parent_of(path_)));
    }
    published_ = true;
  }
  clear();
  return fine();
}

std::string SharedDirectory::name() const { return path_.substr(parent_of(path_).size()); }

std::string SharedDirectory::removed() const {
  return folder_.substr(0, folder_.size() - kPieces.size()) + std::string(kRemoved);
}

void SharedDirectory::clear() const {
  // Under another name first: a kill must not leave parts without their plan, or with it, to the
  // next reshard to this target. That name is a fixed one, by which the next part finds what a kill
  // left.
  const std::string old = removed();
  remove_together(old);
  if (there(checkpoint_)) return;  // of another reshard, which has begun meanwhile
  if (::rename(folder_.c_str(), old.c_str()) == 0) remove_together(old);
}

}  // namespace lowbit::ckpt
