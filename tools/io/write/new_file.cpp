#include "io/write/new_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>

#include "io/read/file.h"
#include "io/read/open.h"
#include "io/read/store.h"
#include "io/text.h"
#include "io/write/checkpoint_folder.h"
#include "io/write/inside.h"
#include "io/write/partial_name.h"

namespace lowbit::ckpt {
namespace {

enum class Content : uint8_t { kNothing, kCheckpoint, kPage, kOther };

/// What a file holds, by how it starts: what is read or written here is a zip, a pickle, the length
/// and the JSON of safetensors, or a page.
Content content_of(const std::string& path) {
  const std::string parent = parent_of(path);
  const auto folder = open_folder(parent.empty() ? "." : parent);
  if (!folder.ok()) return Content::kOther;
  const auto file = folder.value()->file(path.substr(parent.size()));
  if (!file.ok()) return Content::kOther;
  char head[9];
  const uint64_t size = std::min<uint64_t>(sizeof head, file.value()->size());
  if (!file.value()->read(0, head, size).ok()) return Content::kOther;
  const std::string_view text(head, size);
  if (text.empty()) return Content::kNothing;
  if (text.starts_with("<!doctype")) return Content::kPage;
  const bool safetensors =
      text.size() == sizeof head && text[6] == 0 && text[7] == 0 && text[8] == '{';
  return safetensors || text.starts_with("PK") || text.starts_with("\x80") ? Content::kCheckpoint
                                                                           : Content::kOther;
}

}  // namespace

Status NewFile::check(const std::string& path, bool replace,
                      const std::vector<std::string>& sources) {
  RETURN_IF_ERROR(check_no_url(path));
  RETURN_IF_ERROR(check_no_stream(path));
  const std::string parent = parent_of(path), name = path.substr(parent.size());
  if (name.empty() || name == "." || name == "..")
    return usage("'" + printable(path) + "' does not name a file to write");
  struct stat info;
  const bool exists = ::lstat(path.c_str(), &info) == 0;
  if (!exists && errno == ENAMETOOLONG)
    return failed("cannot write " + printable(path) + ": " + reason());
  for (const std::string& source : sources) {
    struct stat other;
    const bool same = exists && ::stat(source.c_str(), &other) == 0 &&
                      other.st_dev == info.st_dev && other.st_ino == info.st_ino;
    // Or the zip around a file that is read.
    if (same || (exists && S_ISREG(info.st_mode) && inside(source, path)))
      return usage(printable(path) + " is the source; choose another target");
    if (exists && inside(source, path))
      return usage(printable(path) + " holds the source " + printable(source) +
                   "; choose another target");
  }
  if (exists && !S_ISREG(info.st_mode))
    return usage(printable(path) + " exists and is " +
                 (S_ISDIR(info.st_mode) ? "a folder" : "not a regular file") +
                 "; choose another name for the file");
  const Content content = exists ? content_of(path) : Content::kNothing;
  if (content == Content::kOther)
    return usage(printable(path) +
                 " exists and is neither a checkpoint nor a page, "
                 "which --force does not replace; choose another name");
  if (exists && !replace) return usage(printable(path) + " exists; --force replaces it");
  // A page in a folder that is read is not part of it.
  for (const std::string& source : sources) {
    if (exists && content != Content::kPage && inside(path, source))
      return usage(printable(path) + " lies in the source " + printable(source) +
                   ", of which it may be a part; choose another target");
  }
  if (!parent.empty() && ::stat(parent.c_str(), &info) != 0 && errno == ENOENT)
    return failed("cannot write " + printable(path) + ": there is no folder " + printable(parent));
  return fine();
}

Status NewFile::check_page(const std::string& path) {
  struct stat info;
  const bool checkpoint = ::lstat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) &&
                          content_of(path) == Content::kCheckpoint;
  return checkpoint ? Status(usage(printable(path) + " is a checkpoint, which no page replaces; "
                                                     "choose another name"))
                    : fine();
}

Result<std::shared_ptr<NewFile>> NewFile::create(const std::string& path, bool replace,
                                                 const std::vector<std::string>& sources) {
  RETURN_IF_ERROR(check(path, replace, sources));
  const std::string parent = parent_of(path), name = path.substr(parent.size());
  struct stat info;
  const bool exists = ::lstat(path.c_str(), &info) == 0;
  std::string temporary = parent + partial_name(name);
  const int fd = ::mkostemp(temporary.data(), O_CLOEXEC);
  if (fd < 0)
    return failed("cannot write " + printable(path) + ": no file can be created in its folder (" +
                  reason() + ")");
  // mkostemp's file is private; a checkpoint has the mode that open() would give, and is no more
  // open than what is in it was.
  const bool opened = ::fchmod(fd, 0666 & ~mask_of_process() & mode_of(sources)) == 0;
  const std::string why = reason();
  ::close(fd);
  std::shared_ptr<OutputFile> file(new OutputFile(std::make_shared<OutputFile::Pool>(), temporary));
  file->created_ = true;
  std::shared_ptr<NewFile> out(
      new NewFile(path, temporary, exists, std::make_shared<Output>(std::move(file), 0)));
  if (!opened) return failed("cannot set the mode of " + printable(temporary) + ": " + why);
  return out;
}

NewFile::~NewFile() {
  if (!committed_) ::unlink(temporary_.c_str());
}

Status NewFile::commit() {
  RETURN_IF_ERROR(output_->close());
  const char *from = temporary_.c_str(), *to = path_.c_str();
  int done =
      replace_ ? ::rename(from, to) : ::renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE);
  if (done != 0 && !replace_ && lacks_call(errno)) {
    // A file system without RENAME_NOREPLACE: a link fails where the name is taken. Some have
    // neither (FUSE, SMB).
    done = ::link(from, to);
    if (done == 0) ::unlink(from);
    if (done != 0 && errno != EEXIST) done = rename_new(temporary_, path_);
  }
  if (done != 0 && errno == EEXIST)
    return usage(printable(path_) +
                 " was created by another program during the write; "
                 "--force replaces it");
  if (done != 0)
    return failed("cannot rename " + printable(temporary_) + " to " + printable(path_) + ": " +
                  reason());
  committed_ = true;
  return sync_folder(parent_of(path_));
}

}  // namespace lowbit::ckpt
