// Reads boxes of a directory's tensors, verifies what it reads, and reads little more than that.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>

#include "container/dcp/recorded.h"
#include "container/dcp/tiles.h"
#include "container/manifest/box.h"
#include "container/manifest/manifest.h"
#include "io/read/mapped_file.h"

namespace lowbit::ckpt {

/// What the headers of items say, so that each is read once. Thread-safe.
class PayloadCache {
 public:
  /// The values of a plain chunk, checked against the manifest. A subclass is an error.
  Result<Payload> find(const Manifest& manifest, const Tensor& tensor, const Chunk& chunk);

 private:
  std::mutex lock_;
  std::unordered_map<const Chunk*, Payload> known_;
};

/// All functions are thread-safe.
///
/// Of a chunk with digests, whole cells are read (tiles.h), and verified before the values are
/// handed out. Of any other chunk the elements are read, and `finish` verifies the checksum of its
/// record, for which it reads what is left of it.
class VerifiedReader {
 public:
  /// `verify`: false reads exactly the elements of a box, and verifies nothing.
  /// `recorded`: null where the directory has no lowbit.json. It, and the cache, must outlive this.
  VerifiedReader(const Manifest& manifest, const Recorded* recorded, bool verify,
                 PayloadCache& cache)
      : manifest_(manifest), recorded_(recorded), verify_(verify), cache_(cache) {}
  /// The elements of a box, row-major, into `out`.
  Status read(const Tensor& tensor, const Box& box, char* out);
  /// Reads and verifies what is left of records that have no digests; then no file has changed.
  Status finish();
  /// Bytes of values that were read, but for those that `finish` read.
  uint64_t bytes() const { return bytes_; }
  /// Of them, those that were copied from mapped pages: the kernel counts no read of theirs.
  uint64_t mapped() const { return mapped_; }

 private:
  struct Part;
  Status read_part(const Part& part);
  Status read_record(const Part& part, const Payload& payload);
  /// `digits`: of the grid's cells, or the digest of a single one; null: none is verified.
  Status read_tiles(const Part& part, const Payload& payload, const TileGrid& grid,
                    const std::string* digits);
  static void put(const Part& part, const Box& box, const Shape& stride, const char* from);
  /// Where values go, row-major, and whether they stay there; `cells` takes their digests, or null.
  struct Target {
    char* out;
    bool is_last;
    CellHashes* cells;
  };
  /// A rectangle of the chunk's matrix; more will be fetched up to `end_row`.
  Status fetch(const Payload& payload, const TileGrid& grid, const TileRange& range,
               MappedFile& mapped, uint64_t end_row, const Target& to);
  static void gather(const char* from, uint64_t pitch, uint64_t row, uint64_t rows,
                     const Target& to);
  Error not_as_recorded(const Part& part) const;

  const Manifest& manifest_;
  const Recorded* recorded_;
  bool verify_;
  PayloadCache& cache_;
  MappedFiles mapped_files_;
  std::atomic<uint64_t> bytes_ = 0, mapped_ = 0;
};

}  // namespace lowbit::ckpt
