// The digests that lowbit leaves in the directories that it writes (lowbit.json;
// docs/reference/ckpt-commands.md has its layout).
#pragma once

#include <map>
#include <optional>
#include <string>

#include "container/dcp/dcp.h"
#include "container/manifest/manifest.h"

namespace lowbit::ckpt {

struct Recorded {
  struct Tiles {
    uint64_t down = 1, across = 1;
    std::string digits;
  };
  struct Entry {
    std::string dtype;
    Shape shape;
    std::map<std::string, std::string> chunks;  // digests by chunk_key
    std::map<std::string, Tiles> tiles;         // the same; of chunks with more than one cell
  };
  std::map<std::string, Entry> tensors;
  std::optional<std::map<std::string, std::string>> values;  // null: the file says nothing of them
};

/// The digest of a value's item in a directory, by its bytes.
Result<std::string> value_digest(const Manifest& manifest, const Blob& blob);
/// Null where the checkpoint is not a directory or has no such file.
Result<std::optional<Recorded>> read_recorded(const Manifest& manifest);

}  // namespace lowbit::ckpt
