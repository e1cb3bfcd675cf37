// Writes the items of a DCP directory.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "container/dcp/tiles.h"
#include "container/document/document.h"
#include "container/manifest/box.h"
#include "container/zip/zip.h"
#include "io/write/output.h"

namespace lowbit::ckpt {

/// The size of a plain tensor's item.
Result<uint64_t> item_length(const Dtype& dtype, const Shape& shape);

/// Writes the item of a value with that pickle. Returns the digest of the item's bytes.
Result<std::string> write_value_item(const std::string& pickle, Output& to);

/// The item of a tensor, filled in row-major order.
class TensorItem {
 public:
  TensorItem(std::shared_ptr<ByteSink> file, uint64_t position, uint64_t buffer, const Dtype& dtype,
             Box box)
      : dtype_(dtype),
        box_(std::move(box)),
        left_(volume(box_.shape)),
        out_(std::move(file), position, buffer),
        zip_(out_),
        hash_(box_.shape, static_cast<uint64_t>(dtype.bytes)) {}
  const Box& box() const { return box_; }
  Status begin();
  /// The next elements. After the last ones the item is complete.
  Status add(const char* data, uint64_t elements);
  /// The digests of the elements.
  ChunkDigest digest() const { return hash_.digest(); }

 private:
  const Dtype& dtype_;
  Box box_;
  uint64_t left_;
  Output out_;
  ZipWriter zip_;
  ChunkHasher hash_;
};

/// Copies items unchanged, and verifies every checksum.
class ItemCopier {
 public:
  /// `piece`: the bytes in memory at a time.
  ItemCopier(const Manifest& from, uint64_t piece) : from_(from), piece_(piece) {}
  /// Copies the item of a tensor. Returns the digests of its elements; for a subclass one of its
  /// parts, each after its name and a zero byte.
  Result<ChunkDigest> tensor(const Tensor& tensor, const Chunk& chunk, Output& to,
                             const std::function<Status(uint64_t)>& done);
  /// Copies the item of a value. Returns the digest of the item's bytes.
  Result<std::string> value(const Blob& blob, Output& to);

 private:
  /// The bytes of a file that enter `hash` on the way.
  struct Part {
    uint64_t begin, end;
  };
  using Add = std::function<void(const char*, uint64_t)>;
  Status copy(const FileExtent& extent, const std::string& what, Output& to, const Part* part,
              const Add& add, const std::function<Status(uint64_t)>& done);
  const Manifest& from_;
  uint64_t piece_;
};

}  // namespace lowbit::ckpt
