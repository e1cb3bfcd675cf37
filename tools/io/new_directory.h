// A new folder that appears whole or not at all.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/output.h"

namespace lowbit::ckpt {

/// A folder that is written under a temporary name beside its target. `commit` gives it its name;
/// without it the destructor removes the folder. A killed process leaves only the temporary folder,
/// `.NAME.partial-XXXXXX`.
class NewDirectory {
 public:
  /// An error if the target exists, unless `replace` is set and the target is an empty folder or a
  /// checkpoint. None of `sources` may be the target or lie in it.
  static Status check(const std::string& path, bool replace,
                      const std::vector<std::string>& sources = {});
  /// Checks, and creates the folder.
  static Result<std::shared_ptr<NewDirectory>> create(const std::string& path, bool replace,
                                                      const std::vector<std::string>& sources = {});
  /// The folder that `create` made in another process, which let it live, or that a program made by
  /// itself.
  static Result<std::shared_ptr<NewDirectory>> adopt(const std::string& path,
                                                     const std::string& temporary, bool replace);
  /// A new file in the temporary folder of another process.
  static Result<std::shared_ptr<OutputFile>> part_of(const std::string& temporary,
                                                     const std::string& name);
  ~NewDirectory();
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;
  /// The path of the folder before `commit`.
  const std::string& temporary() const { return temporary_; }
  /// A new file in the folder, written at any offset. "a/b" is one of a folder in it, which is made
  /// where it is not there.
  Result<std::shared_ptr<OutputFile>> part(const std::string& name);
  /// A new file in the folder, written from start to end.
  Result<std::shared_ptr<Output>> file(const std::string& name);
  /// Syncs the folder, gives it its name in one step, and then removes an old folder of that name.
  /// On a file system that cannot exchange two folders, the old one is first renamed to
  /// `.NAME.partial-XXXXXX.old`; a kill between the two steps leaves that, whole: without its
  /// `.metadata` it is one that was being removed. `sync`: false where the files are not on the disk
  /// either.
  Status commit(bool sync = true);

 private:
  NewDirectory(std::string path, std::string temporary, bool replace)
      : path_(std::move(path)), temporary_(std::move(temporary)), replace_(replace) {}
  Status take_place();
  std::string path_, temporary_, old_;
  bool replace_, committed_ = false;
  std::shared_ptr<OutputFile::Pool> pool_ = std::make_shared<OutputFile::Pool>();
};

}  // namespace lowbit::ckpt
