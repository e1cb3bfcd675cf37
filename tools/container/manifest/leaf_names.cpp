#include "container/manifest/leaf_names.h"

#include "io/text.h"

namespace lowbit::ckpt {

namespace {

/// A path as its keys are written in Python: ['a']['b'][0].
std::string keys_of(const Path& path) {
  std::string out;
  for (const Key& key : path)
    out += "[" + (key.is_name() ? "'" + printable(key.name) + "'" : key.text()) + "]";
  return out;
}

/// The path of the leaf that has this flat name.
const Path* path_of(const Manifest& manifest, const std::string& name) {
  for (const Tensor& t : manifest.tensors)
    if (t.name == name) return &t.path;
  for (const Blob& b : manifest.blobs)
    if (b.name == name) return &b.path;
  return nullptr;
}

}  // namespace

Status LeafNames::take(const Manifest& manifest, const Path& path, const std::string& what) {
  const std::string name = flat_name(path);
  if (names_.insert(name).second) return fine();
  const Path* other = path_of(manifest, name);
  const std::string both = (other == nullptr ? "" : keys_of(*other) + " and ") + keys_of(path);
  return bad(
      what + ": " + both + " are both called " + printable(name) +
      " when keys are joined by dots, and nothing could tell them apart; rename a key of one "
      "and save again");
}

Status LeafNames::add(Manifest& manifest, Path path, Value value, const std::string& what) {
  RETURN_IF_ERROR(take(manifest, path, what));
  Blob blob;
  blob.name = flat_name(path);
  blob.path = std::move(path);
  blob.value = std::move(value);
  manifest.blobs.push_back(std::move(blob));
  return fine();
}

}  // namespace lowbit::ckpt
