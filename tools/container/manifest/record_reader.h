// Reads records and verifies their CRCs on the way: the bytes that are verified are the bytes that
// are used, and none is read twice.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "container/manifest/record.h"
#include "io/read/file.h"

namespace lowbit::ckpt {

/// The reader of one container, shared by all its threads. Pieces of a record may be read in any
/// order: their CRCs are combined, and compared with the record's once all of it was read. `finish`
/// reads what is left; call it before trusting anything read here.
class RecordReader {
 public:
  explicit RecordReader(FileSet& files) : files_(files) {}
  /// `what` names the owner in errors.
  Status read(const Record& record, uint64_t at, void* out, uint64_t bytes,
              const std::string& what);
  /// Reads a whole record: calls `use(bytes, count)` with pieces of at most `limit` bytes.
  Status read_all(const Record& record, uint64_t limit, const std::string& what,
                  const std::function<Status(const char*, uint64_t)>& use);
  /// Adds bytes of a record that were read in another way to its checksum.
  Status hold(const Record& record, uint64_t at, const void* data, uint64_t bytes,
              const std::string& what);
  /// Verifies records that were read in part, and that no file changed.
  Status finish();
  /// Records that had no CRC.
  uint64_t unchecked() const { return unchecked_; }

 private:
  struct Part {
    uint64_t begin, end;
    uint32_t crc;
  };
  struct Progress {
    Record record;
    std::string what;
    std::mutex lock;
    std::vector<Part> parts;  // by place; they do not touch
    bool done = false;
  };
  /// The parts of a record read so far; null once it is verified.
  std::shared_ptr<Progress> progress(const Record& record, const std::string& what);
  /// Under the progress's lock:
  Status add(Progress& p, uint64_t at, const char* data, uint64_t bytes);
  Status add_rest(Progress& p);
  Status compare(Progress& p);

  FileSet& files_;
  std::mutex lock_;
  std::map<std::pair<uint32_t, uint64_t>, std::shared_ptr<Progress>> begun_;  // by file and offset
  std::atomic<uint64_t> unchecked_ = 0;
};

}  // namespace lowbit::ckpt
