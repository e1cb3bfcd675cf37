// Reads boxes of tensors, whatever chunks store them.
#pragma once

#include <string>
#include <unordered_map>

#include "container/manifest/box.h"
#include "container/manifest/manifest.h"

namespace lowbit::ckpt {

/// Reads one box after another. Not thread-safe.
class TensorReader {
 public:
  explicit TensorReader(const Manifest& manifest)
      : manifest_(manifest), records_(&manifest.container->reader()) {}
  /// The elements of a box, row-major, into `out`. Only chunks that overlap the box are read;
  /// memory besides `out` is bounded.
  Status read(const Tensor& tensor, const Box& box, char* out);
  /// A box of values in one record.
  Status read(const Payload& payload, const Box& box, char* out, const std::string& what);
  /// Frees the cached payloads; the next read looks them up again.
  void forget();

 private:
  struct Transfer;
  /// The values of a chunk, checked against the manifest; valid until the next call.
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
