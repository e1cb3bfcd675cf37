#define XXH_INLINE_ALL
#include <xxhash.h>

#include <memory>

#include "pipeline/reshard.h"
#include "pipeline/rows.h"

namespace lowbit::ckpt {

Result<std::string> digest(const Manifest& manifest, const Progress& progress) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       XXH3_freeState);
  XXH3_128bits_reset(state.get());
  const uint64_t total = tensor_bytes(manifest);
  uint64_t done = 0;
  RowReader reader(manifest);
  std::string buffer;
  for (const Tensor& tensor : manifest.tensors) {
    const std::string head = tensor.name + '\0' + tensor.dtype->name + shape_text(tensor.shape);
    XXH3_128bits_update(state.get(), head.data(), head.size() + 1);
    const uint64_t row = RowReader::row_bytes(tensor);
    const int64_t rows = row == 0 ? 0 : RowReader::rows(tensor);
    const auto at_once =
        static_cast<int64_t>(std::max<uint64_t>(1, (4u << 20) / std::max<uint64_t>(row, 1)));
    for (int64_t at = 0; at < rows; at += at_once) {
      const int64_t stop = std::min(at + at_once, rows);
      buffer.resize(static_cast<uint64_t>(stop - at) * row);
      LB_CHECK(reader.read(tensor, at, stop, buffer.data()));
      XXH3_128bits_update(state.get(), buffer.data(), buffer.size());
      progress(done += buffer.size(), total);
    }
  }
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state.get()));
  std::string hex;
  for (const unsigned char b : canonical.digest) {
    hex += "0123456789abcdef"[b >> 4];
    hex += "0123456789abcdef"[b & 15];
  }
  return hex;
}

}  // namespace lowbit::ckpt
