// A new folder that appears whole or not at all.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/write/output.h"

namespace lowbit::ckpt {

/// A folder that is written under a temporary name beside its target. `commit` gives it its name;
/// without it the destructor removes the folder. A killed process leaves only the temporary folder,
/// `.NAME.partial-XXXXXX`.
///
/// What a folder of that name has besides a checkpoint is never removed. A directory of
/// torch.distributed.checkpoint is published between such files, by moving its own there
/// (publish_into); any other folder is refused.
class NewDirectory {
 public:
  enum class Kind {
    kDcp,     // may replace a checkpoint between other files
    kSave,    // the same, of a training program: a folder without a checkpoint is no obstacle
    kFolder,  // has no file that makes it valid in one step, so that nothing else may lie in it
  };
  /// An error if the target exists, unless `replace` is set and the target is an empty folder or
  /// has a checkpoint. None of `sources` may be the target or lie in it, nor the target in one of
  /// them.
  static Status check(const std::string& path, bool replace, Kind kind,
                      const std::vector<std::string>& sources = {});
  /// An error if the target exists and is one of `sources` or holds one, or lies in the first.
  static Status check_sources(const std::string& path, const std::vector<std::string>& sources);
  /// Checks, and creates the folder.
  static Result<std::shared_ptr<NewDirectory>> create(const std::string& path, bool replace,
                                                      Kind kind,
                                                      const std::vector<std::string>& sources = {});
  /// The folder that a program made by itself, for a save. `number`: as `file_number` said when its
  /// files were named.
  static Result<std::shared_ptr<NewDirectory>> adopt(const std::string& path,
                                                     const std::string& temporary, bool replace,
                                                     std::optional<uint64_t> number);
  /// The N that files __RANK_N.distcp must have where they are published between others; nothing
  /// where they will have a folder of their own.
  static Result<std::optional<uint64_t>> file_number(const std::string& path);
  /// A new file in the temporary folder of another process.
  static Result<std::shared_ptr<OutputFile>> part_of(const std::string& temporary,
                                                     const std::string& name);
  ~NewDirectory();
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;
  /// As `file_number` said.
  std::optional<uint64_t> number() const { return number_; }
  /// The path of the folder before `commit`.
  const std::string& temporary() const { return temporary_; }
  /// A new file in the folder, written at any offset. "a/b" is one of a folder in it, which is made
  /// where it is not there.
  Result<std::shared_ptr<OutputFile>> part(const std::string& name);
  /// A new file in the folder, written from start to end.
  Result<std::shared_ptr<Output>> file(const std::string& name);
  /// Syncs the folder, gives it its name in one step, and then removes an old checkpoint of that
  /// name. On a file system that cannot exchange two folders, the old one is first renamed to
  /// `.NAME.partial-XXXXXX.old`; a kill between the two steps leaves that, whole: without its
  /// `.metadata` it is one that was being removed. `sync`: false where the files are not on the
  /// disk either.
  Status commit(bool sync = true);

 private:
  NewDirectory(std::string path, std::string temporary, bool replace,
               std::optional<uint64_t> number)
      : path_(std::move(path)),
        temporary_(std::move(temporary)),
        replace_(replace),
        number_(number) {}
  Status take_place();
  std::string path_, temporary_, old_;
  bool replace_, committed_ = false;
  std::optional<uint64_t> number_;
  std::shared_ptr<OutputFile::Pool> pool_ = std::make_shared<OutputFile::Pool>();
};

}  // namespace lowbit::ckpt
