// Writing one file that appears whole or not at all.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/output.h"

namespace lowbit::ckpt {

/// A file that comes into being under a temporary name beside its place and takes its place when
/// `commit` is called; removed where it never is. A killed process leaves only the temporary file,
/// `.NAME.partial-XXXXXX`.
class NewFile {
 public:
  /// Refuses a place that exists, unless `replace`, and always one that is no regular file, or one
  /// that is neither empty nor a checkpoint nor a page of this program.
  /// Never a file of `sources`, which are being read.
  static Status check(const std::string& path, bool replace,
                      const std::vector<std::string>& sources = {});
  /// After `check`, the file.
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
