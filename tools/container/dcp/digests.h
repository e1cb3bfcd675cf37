// lowbit.json: the digests of what a DCP directory holds, for `verify`. torch does not read it.
#pragma once

#include <string>
#include <vector>

#include "container/dcp/tiles.h"
#include "container/manifest/manifest.h"
#include "io/write/output.h"

namespace lowbit::ckpt {

/// What lowbit.json says of its digests.
inline constexpr const char* kDigestKind = "xxh3-128";
/// The name of a chunk in lowbit.json: its offset, joined by commas.
std::string chunk_key(const Shape& offset);
/// Writes the file: the digest of `.metadata`, for each tensor of the manifest the digests of its
/// chunks, for each blob its own.
Status write_digests(Output& out, const Manifest& manifest, const std::string& metadata,
                     const std::vector<std::vector<ChunkDigest>>& chunks_of_tensors,
                     const std::vector<std::string>& values);

/// The most bytes that the file of a directory has, whoever of lowbit wrote it.
uint64_t max_digests(const Manifest& manifest);

}  // namespace lowbit::ckpt
