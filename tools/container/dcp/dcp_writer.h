// How a document becomes a DCP directory. Where every item lies is computed first; then threads
// take one leaf after the other, read it once in row-major order, and hand each chunk its elements.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "container/dcp/tiles.h"
#include "container/document/torch_archive.h"
#include "container/document/writer.h"
#include "io/write/new_directory.h"
#include "io/write/shared_directory.h"

namespace lowbit::ckpt {

/// One directory being written. Call `plan`, then one of the others, once.
class DcpWriter {
 public:
  DcpWriter(const Document& from, const WriteOptions& options);
  /// Where everything will lie, but for the values.
  Status plan();
  Result<WriteReport> write(NewDirectory& folder, const std::string& path);
  /// The files of one part, and the rest where it is the last one.
  Result<WriteReport> write_part(const std::string& path);
  const WriteReport& report() const { return report_; }

 private:
  // Where things lie:
  /// The chunk of the source that has this box and can be copied as it is; null where none.
  const Chunk* same_chunk(const Leaf& leaf, const Box& box) const;
  Status plan_tensor(const Leaf& leaf);
  Result<uint64_t> length_of(const Dtype& dtype, const Shape& shape);
  /// Items follow one another at multiples of 64, so that their data does too.
  void place_items();
  struct SubclassItem {
    std::shared_ptr<Document> document;  // the archive points into it
    TorchArchive archive;
    bool requantized;
  };
  Result<SubclassItem> subclass_item(const Leaf& leaf, const Box& box) const;

  // What is written:
  /// All values. `file`: null only computes their places and digests.
  Status write_values(std::shared_ptr<OutputFile> file);
  Status write_tensors();
  Status write_tensor(size_t i);
  Status write_band(size_t i, const Box& band, std::span<const size_t> chunks);
  /// One chunk of a tensor subclass that is not an item of the source.
  Status write_subclass(size_t i, size_t c);
  Status count(uint64_t bytes);
  /// The error of a run that is told to stop, with what it leaves.
  Error stopped() const;

  // Parts:
  /// The part that writes each file; neighbours go together, since they share rows of the source.
  std::vector<uint64_t> owners() const;
  /// What all parts must agree on.
  Result<std::string> plan_text() const;
  std::string said() const;
  Status hear(const std::string& said);
  /// What a folder of complete parts must have before it is published.
  Status check_parts(SharedDirectory& folder) const;

  const Document& from_;
  const WriteOptions& options_;
  bool mixed_ = false;  // the source has items that may be copied
  int threads_ = 1;
  uint64_t share_ = 0, piece_ = 0;  // of the memory
  Manifest to_;
  std::vector<const Leaf*> leaf_of_;               // of to_.tensors
  std::vector<std::vector<ChunkDigest>> digests_;  // of their chunks
  std::vector<std::string> value_digests_;         // of to_.blobs
  std::map<std::pair<const Dtype*, Shape>, uint64_t> lengths_;
  std::vector<std::shared_ptr<OutputFile>> files_;  // null: another part writes it
  uint64_t values_end_ = 0;
  std::string pieces_;  // the folder that parts share, once it is there
  WriteReport report_;
  std::mutex progress_lock_;
  uint64_t done_ = 0, total_ = 0;
};

}  // namespace lowbit::ckpt
