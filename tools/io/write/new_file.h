// A new file that appears whole or not at all.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/write/output.h"

namespace lowbit::ckpt {

/// A file that is written under a temporary name beside its target. `commit` gives it its name;
/// without it the destructor removes the file. A killed process leaves only the temporary file,
/// `.NAME.partial-XXXXXX`.
class NewFile {
 public:
  /// An error if the target exists, unless `replace` is set and the target is a regular file that
  /// is empty, a checkpoint or a page of this program. The target may be none of `sources`, what is
  /// being read, and of their folders it may replace pages alone.
  static Status check(const std::string& path, bool replace,
                      const std::vector<std::string>& sources = {});
  /// An error if the target of a page is a checkpoint.
  static Status check_page(const std::string& path);
  /// Checks, and creates the file.
  static Result<std::shared_ptr<NewFile>> create(const std::string& path, bool replace,
                                                 const std::vector<std::string>& sources = {});
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  Output& output() { return *output_; }
  /// Syncs the file and gives it its name in one step.
  Status commit();

 private:
  NewFile(std::string path, std::string temporary, bool replace, std::shared_ptr<Output> output)
      : path_(std::move(path)),
        temporary_(std::move(temporary)),
        replace_(replace),
        output_(std::move(output)) {}
  std::string path_, temporary_;
  bool replace_, committed_ = false;
  std::shared_ptr<Output> output_;
};

}  // namespace lowbit::ckpt
