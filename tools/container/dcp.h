// The directory of torch.distributed.checkpoint: `.metadata`, a pickle that says which box of which
// tensor is which bytes of which file, and `.distcp` files of items. Written by torch 2.1 to 2.15;
// docs/ckpt.md lists the variants.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "container/manifest.h"

namespace lowbit::ckpt {

/// The manifest of a directory, checked: every chunk inside its tensor, chunks disjoint and
/// covering it, an item for each, items disjoint and inside their files, plain file names.
Result<Manifest> read_dcp(const std::string& path);

/// `.metadata` (or one rank's) to a manifest, without looking at the other files. For tests, and
/// the above.
Result<Manifest> parse_metadata(const std::string& bytes, const std::string& what);
/// Whether the chunks tile their tensors.
Status check_coverage(const Manifest& manifest);

/// The bytes of `.metadata` for a manifest, as torch 2.11 to 2.15 and older read it.
std::string metadata_bytes(const Manifest& manifest, const std::string& path);

}  // namespace lowbit::ckpt
