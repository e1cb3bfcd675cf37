// Boxes of tensors, whatever chunks they are stored in.
#pragma once

#include <string>
#include <unordered_map>

#include "container/box.h"
#include "container/manifest.h"
#include "container/record_reader.h"

namespace lowbit::ckpt {

class TensorReader {
 public:
  explicit TensorReader(const Manifest& manifest)
      : manifest_(manifest), records_(manifest.container->files()) {}
  /// The box's elements, row-major, into `out`. Only bytes of chunks that the box meets are read;
  /// memory beside `out` is bounded.
  Status read(const Tensor& tensor, const Box& box, char* out);
  /// Rows [begin, end) of a tensor that has dimensions.
  Status read_rows(const Tensor& tensor, int64_t begin, int64_t end, char* out);
  /// Where a chunk's values lie, held against the manifest.
  Result<const Payload*> payload(const Tensor& tensor, const Chunk& chunk);
  RecordReader& records() { return records_; }

 private:
  struct Transfer;
  Status run(const Transfer& transfer, char* out);
  std::string file_name(uint32_t file) const;  // safe to print

  const Manifest& manifest_;
  RecordReader records_;
  std::unordered_map<const Chunk*, Payload> payloads_;
  std::string span_;
};

}  // namespace lowbit::ckpt
