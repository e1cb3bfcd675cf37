// What a path names, on disk or in an object store.
#pragma once

#include <memory>
#include <string>

#include "io/read/file.h"

namespace lowbit::ckpt {

/// By a path or a URL; links are followed. kMissing leaves why in `errno`.
Result<PathKind> path_kind(const std::string& path);
/// Whether that can be told to be a file.
bool is_file(const std::string& path);

Result<std::shared_ptr<Directory>> open_folder(const std::string& path);

/// A file by its folder and its name there.
struct NamedFile {
  std::shared_ptr<Directory> folder;
  std::string name;
};
/// The folder of a file that the user named. Links on the path are followed.
Result<NamedFile> folder_around(const std::string& path);

}  // namespace lowbit::ckpt
