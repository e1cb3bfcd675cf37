#include "io/read/open.h"

#include <sys/stat.h>

#include <cerrno>
#include <climits>
#include <cstdlib>

#include "io/read/store.h"
#include "io/text.h"

namespace lowbit::ckpt {

Result<PathKind> path_kind(const std::string& path) {
  if (is_url(path)) {
    ASSIGN_OR_RETURN(location, open_store(path));
    ASSIGN_OR_RETURN(entry, location->info(""));
    errno = ENOENT;
    return entry.kind;
  }
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return PathKind::kMissing;
  if (S_ISREG(info.st_mode)) return PathKind::kFile;
  if (S_ISDIR(info.st_mode)) return PathKind::kFolder;
  return S_ISFIFO(info.st_mode) ? PathKind::kPipe : PathKind::kOther;
}

bool is_file(const std::string& path) {
  const auto kind = path_kind(path);
  return kind.ok() && kind.value() == PathKind::kFile;
}

Result<std::shared_ptr<Directory>> open_folder(const std::string& path) {
  return is_url(path) ? open_store_folder(path) : Directory::local(path);
}

Result<NamedFile> folder_around(const std::string& path) {
  if (is_url(path)) {
    ASSIGN_OR_RETURN(folder, open_store_object(path));
    return NamedFile{std::move(folder), path.substr(path.find_last_of('/') + 1)};
  }
  char resolved[PATH_MAX];
  if (::realpath(path.c_str(), resolved) == nullptr)
    return bad("cannot open " + printable(path) + ": " + reason());
  const std::string full = resolved;
  const size_t slash = full.find_last_of('/');
  ASSIGN_OR_RETURN(folder, Directory::local(slash == 0 ? "/" : full.substr(0, slash)));
  return NamedFile{std::move(folder), full.substr(slash + 1)};
}

}  // namespace lowbit::ckpt
