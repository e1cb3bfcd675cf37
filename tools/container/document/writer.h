// Writes a document into a container. The output appears whole or not at all.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "container/document/document.h"

namespace lowbit::ckpt {

/// Called with the bytes done and the bytes in all; returning false stops the writer. One thread at
/// a time calls it.
using Progress = std::function<bool(uint64_t, uint64_t)>;
inline Error interrupted() { return failed("interrupted; nothing was left behind"); }

/// How tensors are cut: into parts[i] parts along dimension dims[i]. FSDP2 on W ranks is parts {W},
/// dims {0}. A tensor without such a dimension is not cut along it, and belongs to part 0.
struct Mesh {
  std::vector<int64_t> parts = {1};
  std::vector<int> dims = {0};
  int64_t ranks() const {
    int64_t n = 1;
    for (const int64_t p : parts) n *= p;
    return n;
  }
};

/// One of the parts of a directory that several processes write, each some of the files.
struct Part {
  uint64_t number = 0, count = 1;  // numbers count from 0
};

struct WriteOptions {
  bool replace = false;           // an existing target
  int threads = 1;                // that read, convert and write
  uint64_t memory = 64u << 20;    // bytes of buffers, all threads together
  Mesh mesh = {};                 // kDcp only
  std::optional<Part> part = {};  // kDcp only: write that part; the last one publishes all
  std::string part_plan = {};     // what all parts must be told alike, besides layout and source
  std::string published_as = {};  // kDcp: the path that the metadata says; "": the target's
  uint64_t file_number = 0;       // kDcp: the N of the files __RANK_N.distcp
  bool manifest = true;           // kDcp: leave digests of what was written (lowbit.json)
  Progress progress = [](uint64_t, uint64_t) { return true; };
};

struct WriteReport {
  uint64_t tensors = 0, values = 0, chunks = 0, copied = 0;  // copied: items taken as they were
  uint64_t bytes = 0;                                        // of tensors
  uint64_t recut = 0;                  // tensors of which some chunk is not copied
  uint64_t requantized = 0;            // chunks of `recut`
  uint64_t unchecked = 0;              // source records that had no checksum
  bool published = true;               // false: parts are missing
  std::vector<uint64_t> missing = {};  // their numbers
};

Result<WriteReport> write_dcp(const Document& document, const std::string& path,
                              const WriteOptions& options);
/// What write_dcp would do. Reads headers only, and writes nothing.
Result<WriteReport> plan_dcp(const Document& document, const WriteOptions& options);
/// Writes one torch.save file. Shared storages stay shared.
Result<WriteReport> write_torch(const Document& document, const std::string& path,
                                const WriteOptions& options);
/// Writes one safetensors file. Paths and values are stored in `__metadata__`, so that reading it
/// gives the same document (docs/definitions/ckpt-formats.md has the convention).
Result<WriteReport> write_safetensors(const Document& document, const std::string& path,
                                      const WriteOptions& options);
/// The error that `write_container` would return for its target, for a plan to ask beforehand.
Status check_target(ContainerKind kind, const Document& document, const std::string& path,
                    const WriteOptions& options);
Result<WriteReport> write_container(ContainerKind kind, const Document& document,
                                    const std::string& path, const WriteOptions& options);

}  // namespace lowbit::ckpt
