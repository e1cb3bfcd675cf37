// The file that one rank adds to a directory which several ranks write together.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "container/dcp/tiles.h"
#include "container/document/writer.h"
#include "container/manifest/dtype.h"
#include "io/write/output.h"
#include "io/write/write_run.h"

namespace lowbit::ckpt {

/// What to write: a plain tensor that lies row-major in memory, or an item that was made already.
struct RankItem {
  std::string name;              // for messages
  const Dtype* dtype = nullptr;  // null: `archive`
  Shape shape = {};
  const char* data = nullptr;
  std::string archive = {};
};

/// Where an item lies, and digests of its elements; of an archive, of its bytes and without tiles.
struct RankWritten {
  uint64_t offset = 0, length = 0;
  ChunkDigest digest = {};
};

class RankFile {
 public:
  /// A new file in `folder`, which another process gives its final name. `will_sync`: the disk
  /// begins to write while there is more to come.
  static Result<std::shared_ptr<RankFile>> create(const std::string& folder,
                                                  const std::string& name, bool will_sync);
  /// Appends items, on several threads. Each lies at a multiple of 64, and so does its data.
  Result<std::vector<RankWritten>> write(const std::vector<RankItem>& items, int threads,
                                         const Progress& progress);
  /// Waits until all of it is on the disk.
  Status sync() { return file_->sync(); }
  /// For a save that fails: a full disk gets its room back at once.
  void clear() { file_->clear(); }

 private:
  explicit RankFile(std::shared_ptr<OutputFile> file) : file_(std::move(file)) {}
  static Status write_item(const RankItem& item, RankWritten& to,
                           const std::shared_ptr<WriteRun>& file);
  std::shared_ptr<OutputFile> file_;
  uint64_t end_ = 0;
};

}  // namespace lowbit::ckpt
