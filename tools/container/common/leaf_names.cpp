#include "container/common/leaf_names.h"

#include "io/text.h"

namespace lowbit::ckpt {

Status LeafNames::take(const std::string& name, const std::string& what) {
  return names_.insert(name).second
             ? fine()
             : Status(bad(what + ": two of its leaves are called " + printable(name) +
                          " when their keys are joined by dots, and nothing could tell them apart; "
                          "rename one of the keys and save again"));
}

Status LeafNames::add(Manifest& manifest, Path path, Value value, const std::string& what) {
  Blob blob;
  blob.name = flat_name(path);
  RETURN_IF_ERROR(take(blob.name, what));
  blob.path = std::move(path);
  blob.value = std::move(value);
  manifest.blobs.push_back(std::move(blob));
  return fine();
}

}  // namespace lowbit::ckpt
