// Boxes of tensors, whatever chunks they are stored in.
#pragma once

#include <string>
#include <unordered_map>

#include "container/box.h"
#include "container/manifest.h"

namespace lowbit::ckpt {

/// Reads one range after another; for one thread at a time.
class TensorReader {
 public:
  explicit TensorReader(const Manifest& manifest)
      : manifest_(manifest), records_(&manifest.container->reader()) {}
  /// The box's elements, row-major, into `out`. Only bytes of chunks that the box meets are read;
  /// memory beside `out` is bounded.
  Status read(const Tensor& tensor, const Box& box, char* out);
  /// The same of values that lie in one record.
  Status read(const Payload& payload, const Box& box, char* out, const std::string& what);
  /// Rows [begin, end) of a tensor that has dimensions.
  Status read_rows(const Tensor& tensor, int64_t begin, int64_t end, char* out);
  /// Gives back what it keeps to be fast; the next read learns it again.
  void forget();

 private:
  struct Transfer;
  /// Where a chunk's values lie, held against the manifest; valid until the next call.
  Result<const Payload*> payload(const Tensor& tensor, const Chunk& chunk);
  /// A box of the payload's values into an array of other strides.
  Status take(const Payload& payload, const Box& box, const Shape& to, char* out,
              const std::string& what);
  Status run(const Transfer& transfer, char* out);
  std::string file_name(uint32_t file) const;  // safe to print

  const Manifest& manifest_;
  RecordReader* records_;
  std::unordered_map<const Chunk*, Payload> payloads_;
  std::string span_;
};

}  // namespace lowbit::ckpt
