// From any number of ranks to any other, as a copy plan: items whose box stays are copied as they
// are, other boxes are read row by row and written anew. Memory is a few megabytes, whatever the
// checkpoint's size.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "container/manifest.h"

namespace lowbit::ckpt {

/// Called with bytes done and bytes in all.
using Progress = std::function<void(uint64_t, uint64_t)>;

struct ReshardReport {
  uint64_t tensors = 0, blobs = 0, chunks = 0, copied = 0, bytes = 0;
};

/// Writes the checkpoint to `path` for `ranks` ranks: every tensor is cut along dimension 0 into
/// FSDP2's parts of ceil(n / ranks) rows, rank r's in
/// __r_0.distcp; scalars and values that are no tensors go to rank 0.
Result<ReshardReport> reshard(const Manifest& from, const std::string& path, int64_t ranks,
                              bool replace, const Progress& progress);

/// XXH3-128, in hex, of all tensors by name: name, dtype, shape and row-major bytes. It does not
/// depend on how they are cut.
Result<std::string> digest(const Manifest& manifest, const Progress& progress);

/// Bytes of all tensors.
uint64_t tensor_bytes(const Manifest& manifest);

}  // namespace lowbit::ckpt
