// Rows of a tensor, whatever boxes it is stored in.
#pragma once

#include <map>
#include <string>

#include "container/item.h"
#include "container/manifest.h"

namespace lowbit::ckpt {

/// Reads rows of one tensor after another. Every item is checked on first touch: its shape and
/// dtype against the manifest, its bytes against its CRC.
class RowReader {
 public:
  explicit RowReader(const Manifest& manifest) : manifest_(manifest) {}
  /// Rows [begin, end) of the tensor, row-major, into `out`. A 0-D tensor has one row.
  Status read(const Tensor& tensor, int64_t begin, int64_t end, char* out);
  /// Bytes of one row.
  static uint64_t row_bytes(const Tensor& tensor);
  static int64_t rows(const Tensor& tensor) { return tensor.shape.empty() ? 1 : tensor.shape[0]; }

 private:
  Result<const Payload*> payload(const Tensor& tensor, const Chunk& chunk);
  const Manifest& manifest_;
  const Tensor* current_ = nullptr;
  std::map<const Chunk*, Payload> payloads_;  // of the current tensor
};

}  // namespace lowbit::ckpt
