// torch.save's zip archives, which store records uncompressed: a strict reader of the index, and a
// writer of the same bytes as torch's.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/read/file.h"
#include "io/write/output.h"

namespace lowbit::ckpt {

/// A record of an archive.
struct ZipRecord {
  std::string name;     // without the archive's folder
  uint64_t offset = 0;  // of the data, in the file
  uint64_t size = 0;
  uint32_t crc = 0;
};

struct ZipIndex {
  std::vector<ZipRecord> records;  // by place
  bool has_crcs = false;           // false: the writer computed none, and wrote 0 everywhere
  /// The record of that name; null if there is none.
  const ZipRecord* find(const std::string& name) const;
};

/// The records of the archive in bytes [offset, offset + length) of `file`. Local headers,
/// descriptors and directory must agree; compression, encryption, duplicates, overlaps, gaps, and
/// bytes before or after the archive are errors.
Result<ZipIndex> read_zip(const File& file, uint64_t offset, uint64_t length,
                          const std::string& what);

/// The same of a zip whose records lie in no folder or in several, as other programs write; names
/// are whole.
Result<ZipIndex> read_loose_zip(const File& file, const std::string& what);

/// Verifies the CRC of a record.
Status check_crc(const File& file, const ZipIndex& index, const ZipRecord& record,
                 const std::string& what);

/// Writes one archive at the position of the output. `begin` announces a record and its size, and
/// `data` follows in pieces.
class ZipWriter {
 public:
  explicit ZipWriter(Output& out, std::string folder = "archive")
      : out_(out), base_(out.position()), folder_(std::move(folder)) {}
  Status begin(const std::string& name, uint64_t size);
  Status data(const void* bytes, uint64_t count);
  /// Replaces `data` if the output only counts.
  Status skip(uint64_t count);
  Status end();
  Status record(const std::string& name, const std::string& bytes);
  /// Writes the records that torch writes last, and the directory.
  Status close(const std::string& serialization_id = std::string(40, '0'));

 private:
  /// A record for the directory.
  struct WrittenRecord {
    std::string name;
    uint16_t flags;
    uint32_t crc;
    uint64_t size, offset;
  };
  Output& out_;
  uint64_t base_;
  std::string folder_;
  std::vector<WrittenRecord> records_;
};

}  // namespace lowbit::ckpt
