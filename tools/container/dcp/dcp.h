// The directory of torch.distributed.checkpoint: `.distcp` files of items, and `.metadata`, a
// pickle that maps boxes of tensors to bytes of those files. torch 2.1 to 2.15 write it;
// docs/definitions/ckpt-formats.md lists the variants.
#pragma once

#include <string>

#include "container/manifest/manifest.h"

namespace lowbit::ckpt {

/// Parses `.metadata` (or one rank's) to a manifest, without reading other files.
Result<Manifest> parse_metadata(std::string bytes, const std::string& what);

/// Adds the metadata of another rank: chunk lists are joined. Call `join_done` after the last one;
/// it sorts them.
Status join(Manifest& all, Manifest part, const std::string& what);
void join_done(Manifest& all);

/// The bytes of `.metadata` for a manifest, readable by every torch since 2.1.
std::string metadata_bytes(const Manifest& manifest, const std::string& path);

}  // namespace lowbit::ckpt
