// The stored-only zip of torch.save, to the byte: index of one inside a file, and a writer that
// gives torch's own bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/file.h"
#include "io/output.h"

namespace lowbit::ckpt {

struct ZipRecord {
  std::string name;     // without the archive's folder
  uint64_t offset = 0;  // of the data, in the file
  uint64_t size = 0;
  uint32_t crc = 0;
};

struct ZipIndex {
  std::vector<ZipRecord> records;  // by place
  bool has_crcs = false;           // false: the writer computed none, and wrote 0 everywhere
  /// Null where there is none.
  const ZipRecord* find(const std::string& name) const;
};

/// The records of the zip that is bytes [offset, offset + length) of `file`, local headers,
/// descriptors and directory held against each other: no compression, encryption, duplicate,
/// overlap, gap, prefix, trailer, or second opinion.
Result<ZipIndex> read_zip(const File& file, uint64_t offset, uint64_t length,
                          const std::string& what);

/// The record's bytes against its CRC.
Status check_crc(const File& file, const ZipIndex& index, const ZipRecord& record,
                 const std::string& what);

/// Writes one archive at the output's position. Records are announced with their size; data
/// follows in pieces.
class ZipWriter {
 public:
  explicit ZipWriter(Output& out, std::string folder = "archive")
      : out_(out), base_(out.position()), folder_(std::move(folder)) {}
  Status begin(const std::string& name, uint64_t size);
  Status data(const void* bytes, uint64_t count);
  /// In place of `data`, where the output only counts.
  Status skip(uint64_t count);
  Status end();
  Status record(const std::string& name, const std::string& bytes);
  /// The records that torch writes last, and the directory.
  Status close(const std::string& serialization_id = std::string(40, '0'));

 private:
  struct Entry {
    std::string name;
    uint16_t flags;
    uint32_t crc;
    uint64_t size, offset;
  };
  Output& out_;
  uint64_t base_;
  std::string folder_;
  std::vector<Entry> entries_;
};

}  // namespace lowbit::ckpt
