// Reads records and holds their CRCs: the bytes that are checked are the bytes that are used, and
// none is read twice for it.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "container/manifest.h"

namespace lowbit::ckpt {

/// One for each container, shared by all who read it, from any thread. Pieces of a record may come
/// in any order: their CRCs are put together, and held against the record's as soon as all of it was
/// read. `finish` reads what nobody asked for, and must be called before anything that came from
/// here is trusted.
class RecordReader {
 public:
  explicit RecordReader(FileSet& files) : files_(files) {}
  /// `what` names the owner in errors.
  Status read(const Record& record, uint64_t at, void* out, uint64_t bytes,
              const std::string& what);
  /// Holds bytes of a record that were read in another way.
  Status hold(const Record& record, uint64_t at, const void* data, uint64_t bytes,
              const std::string& what);
  /// Checks what was begun and not read to its end, and that no file changed.
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
  /// Where the record's parts are kept; null where it is done.
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
