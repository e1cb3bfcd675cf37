// A new folder that several processes write together, on machines that share a file system.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/write/output.h"

namespace lowbit::ckpt {

/// The folder lies in `.NAME.partial-pieces` beside its target until every part is there. That
/// folder has:
///
///     plan            what all parts agree on; a part of another plan is refused
///     part-I          what part I says of itself, once its files are complete
///     checkpoint/     the files of complete parts
///     *.XXXXXX        what is being written
///
/// Once the checkpoint has its name, the rest becomes `.NAME.partial-remove` and is removed; what a
/// kill leaves of that, the next part removes.
///
/// Each step is a rename: a part may be killed and started again at any moment, or run twice, in
/// any order, and who sees all parts publishes.
class SharedDirectory {
 public:
  /// Joins the writing of `path`, or begins it.
  static Result<std::shared_ptr<SharedDirectory>> open(const std::string& path,
                                                       const std::string& plan,
                                                       const std::vector<std::string>& sources);
  /// Removes what this process was writing.
  ~SharedDirectory();
  SharedDirectory(const SharedDirectory&) = delete;
  SharedDirectory& operator=(const SharedDirectory&) = delete;
  /// The folder that parts share.
  const std::string& path() const { return folder_; }
  /// The last name of the target's path: the same in every part, whose machines may have the
  /// folders above it under other names.
  std::string name() const;
  /// Whether the target has its name already.
  bool published() const { return published_; }
  /// What a part said; nothing where it is not complete, or where all are and another part has
  /// published them.
  Result<std::optional<std::string>> part(uint64_t number);
  /// A new file, which `place` gives its name.
  Result<std::shared_ptr<OutputFile>> file(const std::string& name);
  /// Syncs the new files, gives them their names, and says that the part is complete.
  Status complete(uint64_t number, const std::string& said);
  /// An error if a file of a complete part is missing, or has fewer bytes.
  Status check_file(const std::string& name, uint64_t bytes);
  /// The error where the folder has something else than every part says.
  Error incomplete(const std::string& what) const;
  /// Adds a file that says the same whoever writes it.
  Status add(const std::string& name, const std::function<Status(Output&)>& write);
  /// Gives the folder its name, where no other part has done so.
  Status publish();

 private:
  struct NewPart {
    std::string name, temporary;
    std::shared_ptr<OutputFile> file;
  };
  SharedDirectory(std::string path, std::string folder)
      : path_(std::move(path)), folder_(std::move(folder)), checkpoint_(folder_ + "/checkpoint") {}
  Status begin(const std::string& plan, const std::vector<std::string>& sources);
  Status check_plan(const std::string& plan) const;
  /// Removes the folder of a checkpoint that has its name.
  void clear() const;
  /// Where the folder goes when it is removed.
  std::string removed() const;
  /// An empty file of this process alone, which it makes.
  Result<NewPart> make(const std::string& name);
  /// Whether another part has published; it removes the folder then.
  bool see_published();
  /// Writes a small file, whole or not at all; `replace`: false keeps an existing one.
  Status put(const std::string& name, const std::string& content, bool replace);

  std::string path_, folder_, checkpoint_;
  std::vector<NewPart> files_;
  std::shared_ptr<OutputFile::Pool> pool_ = std::make_shared<OutputFile::Pool>();
  bool published_ = false;
};

}  // namespace lowbit::ckpt
