#include "io/write/new_directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "io/read/store.h"
#include "io/text.h"
#include "io/write/checkpoint_folder.h"
#include "io/write/inside.h"
#include "io/write/partial_name.h"

namespace lowbit::ckpt {
namespace {

std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

/// Syncs the folders in a folder.
Status sync_inner(const std::string& path) {
  std::error_code error;
  std::filesystem::recursive_directory_iterator entries(path, error);
  for (; !error && entries != std::filesystem::recursive_directory_iterator();
       entries.increment(error)) {
    if (entries->is_directory(error)) RETURN_IF_ERROR(sync_folder(entries->path().string()));
  }
  return error ? Status(failed("cannot list " + printable(path) + ": " + error.message())) : fine();
}

/// An error if the files that lie in a folder besides a checkpoint do not let a new one in.
Status check_others(const FolderContent& there, NewDirectory::Kind kind, const std::string& shown) {
  if (there.others.empty()) return fine();
  const std::string holds = shown + " holds " + there.names();
  if (kind != NewDirectory::Kind::kSave && !there.dcp && !there.data && !there.universal)
    return usage(holds + ", something else than a checkpoint: choose another name");
  const auto has = [&](const char* name) {
    return std::ranges::find(there.others, name) != there.others.end();
  };
  if (kind == NewDirectory::Kind::kDcp && has("common.pt") && has("metadata.json"))
    return usage(shown +
                 " holds common.pt and metadata.json of Megatron-Core, which would be "
                 "taken for the new checkpoint's: choose another name");
  if (kind == NewDirectory::Kind::kFolder || there.universal)
    return usage(holds +
                 " beside a checkpoint, and a folder of DeepSpeed neither is written nor replaced "
                 "where other files lie: move them away, or choose another name");
  return fine();
}

}  // namespace

Status NewDirectory::check_sources(const std::string& path,
                                   const std::vector<std::string>& sources) {
  const std::string shown = printable(path);
  struct stat info;
  const bool exists = ::lstat(path.c_str(), &info) == 0;
  for (const std::string& source : sources) {
    if (exists && inside(source, path))
      return usage(inside(path, source) ? shown + " is the source; choose another target"
                                        : shown + " cannot be replaced: the source " +
                                              printable(source) + " lies in it");
    const bool dcp = ::lstat((source + "/.metadata").c_str(), &info) == 0;
    if (dcp && &source == &sources.front() && inside(path, source))
      return usage(shown + " lies in the source " + printable(source) +
                   ", of which it would be a part: choose a place beside it");
  }
  return fine();
}

Status NewDirectory::check(const std::string& given, bool replace, Kind kind,
                           const std::vector<std::string>& sources) {
  RETURN_IF_ERROR(check_no_url(given));
  RETURN_IF_ERROR(check_no_stream(given));
  const std::string path = without_slashes(given), shown = printable(path);
  const std::string parent = parent_of(path), name = path.substr(parent.size());
  if (name.empty() || name == "." || name == "..")
    return usage("'" + printable(given) + "' does not name a folder to write");
  struct stat info;
  const bool exists = ::lstat(path.c_str(), &info) == 0;
  if (!exists && errno == ENAMETOOLONG)
    return failed("cannot write " + printable(path) + ": " + reason());
  RETURN_IF_ERROR(check_sources(path, sources));
  if (exists && !S_ISDIR(info.st_mode))
    return usage(shown + " exists and is not a folder; choose another name for the folder");
  if (exists) {
    ASSIGN_OR_RETURN(there, folder_content(path));
    if (kind == Kind::kSave && !replace && (there.dcp || there.universal))
      return usage(shown + " exists; overwrite=True replaces it");
    // First, for --force is no help where it replaces nothing.
    RETURN_IF_ERROR(check_others(there, kind, shown));
    if (kind != Kind::kSave && !replace) return usage(shown + " exists; --force replaces it");
  }
  if (!parent.empty() && ::stat(parent.c_str(), &info) != 0 && errno == ENOENT)
    return failed("cannot write " + shown + ": there is no folder " + printable(parent));
  return fine();
}

Result<std::optional<uint64_t>> NewDirectory::file_number(const std::string& given) {
  const std::string path = without_slashes(given);
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0) return std::optional<uint64_t>();
  ASSIGN_OR_RETURN(there, folder_content(path));
  return there.others.empty() ? std::nullopt : std::optional<uint64_t>(there.next_number);
}

Result<std::shared_ptr<NewDirectory>> NewDirectory::create(
    const std::string& given, bool replace, Kind kind, const std::vector<std::string>& sources) {
  RETURN_IF_ERROR(check(given, replace, kind, sources));
  const std::string path = without_slashes(given);
  const std::string parent = parent_of(path), name = path.substr(parent.size());
  ASSIGN_OR_RETURN(number, file_number(path));
  struct stat info;
  const bool exists = ::lstat(path.c_str(), &info) == 0;
  std::string temporary = parent + partial_name(name);
  if (::mkdtemp(temporary.data()) == nullptr)
    return errno == ENOSPC || errno == EDQUOT
               ? unwritten(path)
               : failed("cannot make a folder beside " + printable(path) + ": " + reason());
  // mkdtemp's folder is private; a checkpoint's has the mode that mkdir would give, and is no more
  // open than what is in it was.
  if (::chmod(temporary.c_str(), 0777 & ~mask_of_process() & mode_of(sources)) != 0)
    return failed("cannot set the mode of " + printable(temporary) + ": " + reason());
  return std::shared_ptr<NewDirectory>(new NewDirectory(path, temporary, exists, number));
}

Result<std::shared_ptr<NewDirectory>> NewDirectory::adopt(const std::string& given,
                                                          const std::string& temporary,
                                                          bool replace,
                                                          std::optional<uint64_t> number) {
  RETURN_IF_ERROR(check(given, replace, Kind::kSave));
  const std::string path = without_slashes(given);
  struct stat info;
  const bool exists = ::lstat(path.c_str(), &info) == 0;
  return std::shared_ptr<NewDirectory>(new NewDirectory(path, temporary, exists, number));
}

Result<std::shared_ptr<OutputFile>> NewDirectory::part_of(const std::string& temporary,
                                                          const std::string& name) {
  std::shared_ptr<OutputFile> file(
      new OutputFile(std::make_shared<OutputFile::Pool>(), temporary + "/" + name));
  ASSIGN_OR_RETURN(handle, file->handle());
  return file;
}

NewDirectory::~NewDirectory() {
  std::error_code ignored;
  pool_->close_all();  // what is removed must be listed first, for which a file must be opened
  if (!committed_) std::filesystem::remove_all(temporary_, ignored);
}

Result<std::shared_ptr<OutputFile>> NewDirectory::part(const std::string& name) {
  if (const size_t slash = name.rfind('/'); slash != std::string::npos) {
    const std::string folder = temporary_ + "/" + name.substr(0, slash);
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error)
      return failed("cannot make the folder " + printable(folder) + ": " + error.message());
  }
  std::shared_ptr<OutputFile> file(new OutputFile(pool_, temporary_ + "/" + name));
  ASSIGN_OR_RETURN(handle, file->handle());
  return file;
}

Result<std::shared_ptr<Output>> NewDirectory::file(const std::string& name) {
  ASSIGN_OR_RETURN(part, this->part(name));
  return std::make_shared<Output>(std::move(part), 0);
}

Status NewDirectory::take_place() {
  const unsigned flags = replace_ ? RENAME_EXCHANGE : RENAME_NOREPLACE;
  const std::string what = "cannot rename " + printable(temporary_) + " to " + printable(path_);
  const auto exists = [this] {
    return usage(printable(path_) +
                 " was created by another program during the write; "
                 "--force replaces it");
  };
  if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), flags) == 0) {
    if (replace_) old_ = temporary_;
    return fine();
  }
  if (errno == EEXIST) return exists();
  if (!lacks_call(errno)) return failed(what + ": " + reason());
  // A file system without these flags (NFS, some FUSE): rename() itself never replaces a folder
  // that has something in it.
  if (replace_) {
    old_ = temporary_ + ".old";
    // What a kill left of one that this one's predecessor had replaced, where the name is a fixed
    // one.
    struct stat info;
    if (::lstat(path_.c_str(), &info) == 0) remove_replaced(old_, path_);
    if (::rename(path_.c_str(), old_.c_str()) != 0) {
      const bool in_the_way = errno == ENOTEMPTY || errno == EEXIST;
      const std::string why = reason(), old = printable(old_);
      old_.clear();
      return failed("cannot move the old " + printable(path_) + " aside: " + why +
                    (in_the_way ? ": " + old + " is in the way; move it elsewhere" : ""));
    }
  }
  if (::rename(temporary_.c_str(), path_.c_str()) == 0) return fine();
  const int why = errno;
  if (replace_ && ::rename(old_.c_str(), path_.c_str()) == 0) old_.clear();
  if (why == EEXIST || why == ENOTEMPTY) return exists();
  errno = why;
  return failed(what + ": " + reason());
}

Status NewDirectory::commit(bool sync) {
  if (sync) RETURN_IF_ERROR(sync_inner(temporary_));
  if (sync) RETURN_IF_ERROR(sync_folder(temporary_));
  if (replace_ && number_) {
    RETURN_IF_ERROR(publish_into(temporary_, path_, sync));
    committed_ = true;
    return fine();
  }
  RETURN_IF_ERROR(take_place());
  committed_ = true;
  if (sync) RETURN_IF_ERROR(sync_folder(parent_of(path_)));
  if (!old_.empty()) remove_replaced(old_, path_);
  return fine();
}

}  // namespace lowbit::ckpt
