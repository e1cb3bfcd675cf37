// Reads records and holds their CRCs: the bytes that are checked are the bytes that are used.
#pragma once

#include <map>
#include <utility>

#include "container/manifest.h"

namespace lowbit::ckpt {

/// Where a record is read from its start to its end, its CRC is computed along the way. Where it is
/// read in another order, it is checked whole before the first byte is given out. `finish` must be
/// called before anything that came from here is trusted.
class RecordReader {
 public:
  explicit RecordReader(FileSet& files) : files_(files) {}
  /// `what` names the owner in errors.
  Status read(const Record& record, uint64_t at, void* out, uint64_t bytes,
              const std::string& what);
  /// Checks what was begun and not read to its end.
  Status finish();
  /// Records that had no CRC.
  uint64_t unchecked() const { return unchecked_; }

 private:
  struct Progress {
    Record record;
    std::string what;
    uint64_t next = 0;  // the CRC covers [0, next)
    uint32_t crc = 0;
    bool done = false;
  };
  Status check_rest(Progress& p);
  static Status compare(Progress& p);

  FileSet& files_;
  std::map<std::pair<uint32_t, uint64_t>, Progress> begun_;  // by file and offset
  uint64_t unchecked_ = 0;
};

}  // namespace lowbit::ckpt
