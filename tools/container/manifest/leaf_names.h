// The names of a manifest's leaves while its reader adds them.
#pragma once

#include <string>
#include <unordered_set>

#include "container/manifest/manifest.h"

namespace lowbit::ckpt {

class LeafNames {
 public:
  /// An error if a leaf of the manifest has this path's flat name already. `what` names the
  /// checkpoint.
  Status take(const Manifest& manifest, const Path& path, const std::string& what);
  /// Adds a value that is not a tensor to the manifest's blobs.
  Status add(Manifest& manifest, Path path, Value value, const std::string& what);
  /// The last leaf was added.
  void clear() { names_.clear(); }

 private:
  std::unordered_set<std::string> names_;
};

}  // namespace lowbit::ckpt
