// The directory of torch.distributed.checkpoint: `.metadata`, a pickle that says which box of which
// tensor is which bytes of which file, and `.distcp` files of items. Written by torch 2.1 to 2.15;
// docs/ckpt.md lists the variants.
#pragma once

#include <string>

#include "container/manifest.h"

namespace lowbit::ckpt {

/// `.metadata` (or one rank's) to a manifest, without looking at the other files.
Result<Manifest> parse_metadata(std::string bytes, const std::string& what);

/// Adds what another rank wrote about its own part: chunk lists are joined. `join_done` after the
/// last one puts them in order.
Status join(Manifest& all, Manifest part, const std::string& what);
void join_done(Manifest& all);

/// The bytes of `.metadata` for a manifest, as every torch since 2.1 reads them.
std::string metadata_bytes(const Manifest& manifest, const std::string& path);

/// How lowbit.json names a chunk: its offset, joined by commas.
std::string chunk_key(const Shape& offset);

}  // namespace lowbit::ckpt
