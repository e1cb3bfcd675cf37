// Writing a folder that appears whole or not at all.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/output.h"

namespace lowbit::ckpt {

/// A folder that comes into being under a temporary name beside its place and takes its place when
/// `commit` is called; removed where it never is. A killed process leaves only the temporary
/// folder, `.NAME.partial-XXXXXX`.
class NewDirectory {
 public:
  /// Refuses a place that exists, unless `replace` and what is there is an empty folder or a
  /// checkpoint. None of `sources` may be that place or lie in it.
  static Status check(const std::string& path, bool replace,
                      const std::vector<std::string>& sources = {});
  /// After `check`, the folder.
  static Result<std::shared_ptr<NewDirectory>> create(const std::string& path, bool replace,
                                                      const std::vector<std::string>& sources = {});
  ~NewDirectory();
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;
  /// Where the folder is until `commit`.
  const std::string& temporary() const { return temporary_; }
  /// A new file in it.
  Result<std::shared_ptr<OutputFile>> part(const std::string& name);
  /// The same, written from its start to its end.
  Result<std::shared_ptr<Output>> file(const std::string& name);
  /// Syncs the folder, and gives it its name in one step; an old folder of that name is removed
  /// after it. A file system that cannot exchange two folders sees the old one renamed to
  /// `.NAME.partial-XXXXXX.old` first, and that is what a kill between the two steps leaves.
  Status commit();

 private:
  NewDirectory(std::string path, std::string temporary, bool replace)
      : path_(std::move(path)), temporary_(std::move(temporary)), replace_(replace) {}
  Status take_place();
  std::string path_, temporary_, old_;
  bool replace_, committed_ = false;
  std::shared_ptr<OutputFile::Pool> pool_ = std::make_shared<OutputFile::Pool>();
};

}  // namespace lowbit::ckpt
