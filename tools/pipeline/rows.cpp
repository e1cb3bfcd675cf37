#include "pipeline/rows.h"

#include <algorithm>
#include <cstring>

namespace lowbit::ckpt {
namespace {

/// Copies `shape` elements of `width` bytes from one strided array to another, dimension `d` on;
/// strides in bytes.
void copy_box(const char* from, const Shape& from_stride, char* to, const Shape& to_stride,
              const Shape& shape, size_t d, uint64_t width) {
  if (d == shape.size()) {
    std::memcpy(to, from, width);
    return;
  }
  if (d + 1 == shape.size() && from_stride[d] == static_cast<int64_t>(width) &&
      to_stride[d] == static_cast<int64_t>(width)) {
    std::memcpy(to, from, static_cast<uint64_t>(shape[d]) * width);
    return;
  }
  for (int64_t i = 0; i < shape[d]; ++i)
    copy_box(from + i * from_stride[d], from_stride, to + i * to_stride[d], to_stride, shape, d + 1,
             width);
}

Shape byte_strides(const Shape& shape, int64_t width) {
  Shape stride(shape.size(), width);
  for (size_t i = shape.size(); i-- > 1;)
    stride[i - 1] = stride[i] * std::max<int64_t>(shape[i], 1);
  return stride;
}

}  // namespace

uint64_t RowReader::row_bytes(const Tensor& tensor) {
  uint64_t bytes = static_cast<uint64_t>(tensor.dtype->bytes);
  for (size_t d = 1; d < tensor.shape.size(); ++d) bytes *= static_cast<uint64_t>(tensor.shape[d]);
  return bytes;
}

Result<const Payload*> RowReader::payload(const Tensor& tensor, const Chunk& chunk) {
  if (current_ != &tensor) {
    payloads_.clear();
    current_ = &tensor;
  }
  if (const auto found = payloads_.find(&chunk); found != payloads_.end()) return &found->second;
  const File& file = *manifest_.files.at(chunk.place.file);
  const std::string what =
      file.name() + ": " + printable(tensor.name) + " at " + shape_text(chunk.offset);
  LB_TRY(payload, read_payload(file, chunk.place, what));
  if (payload.shape != chunk.shape)
    return bad(what + ": the item has the shape " + shape_text(payload.shape) +
               ", the metadata says " + shape_text(chunk.shape));
  if (payload.dtype != tensor.dtype)
    return bad(what + ": the item is " + payload.dtype->name + ", the metadata says " +
               tensor.dtype->name);
  LB_CHECK(check_crc(file, payload.record, what));
  return &payloads_.emplace(&chunk, std::move(payload)).first->second;
}

Status RowReader::read(const Tensor& tensor, int64_t begin, int64_t end, char* out) {
  const uint64_t row = row_bytes(tensor);
  const auto width = static_cast<uint64_t>(tensor.dtype->bytes);
  for (const Chunk& chunk : tensor.chunks) {
    const int64_t start = chunk.offset.empty() ? 0 : chunk.offset[0],
                  count = chunk.shape.empty() ? 1 : chunk.shape[0];
    const int64_t low = std::max(begin, start), high = std::min(end, start + count);
    if (low >= high || std::find(chunk.shape.begin(), chunk.shape.end(), 0) != chunk.shape.end())
      continue;
    LB_TRY(payload, this->payload(tensor, chunk));
    const File& file = *manifest_.files.at(chunk.place.file);
    uint64_t chunk_row = width;
    for (size_t d = 1; d < chunk.shape.size(); ++d)
      chunk_row *= static_cast<uint64_t>(chunk.shape[d]);
    const auto rows = static_cast<uint64_t>(high - low), skip = static_cast<uint64_t>(low - start),
               at = static_cast<uint64_t>(low - begin);
    if (payload->contiguous && chunk_row == row) {
      LB_CHECK(file.read(payload->record.offset + payload->first * width + skip * row,
                         out + at * row, rows * row));
      continue;
    }
    // A box of columns, or a transposed item: through a buffer, run by run.
    std::string buffer;
    Shape from_stride;
    if (payload->contiguous) {
      buffer.resize(rows * chunk_row);
      LB_CHECK(file.read(payload->record.offset + payload->first * width + skip * chunk_row,
                         buffer.data(), buffer.size()));
      from_stride = byte_strides(chunk.shape, static_cast<int64_t>(width));
    } else {
      buffer.resize(payload->record.size);
      LB_CHECK(file.read(payload->record.offset, buffer.data(), buffer.size()));
      for (const int64_t s : payload->stride)
        from_stride.push_back(s * static_cast<int64_t>(width));
    }
    const uint64_t from =
        payload->contiguous
            ? 0
            : payload->first * width +
                  (chunk.shape.empty() ? 0 : skip * static_cast<uint64_t>(from_stride[0]));
    Shape box = chunk.shape;
    if (!box.empty()) box[0] = high - low;
    const Shape to_stride = byte_strides(tensor.shape, static_cast<int64_t>(width));
    uint64_t to = at * row;
    for (size_t d = 1; d < chunk.shape.size(); ++d)
      to += static_cast<uint64_t>(chunk.offset[d] * to_stride[d]);
    copy_box(buffer.data() + from, from_stride, out + to, to_stride, box, 0, width);
  }
  return fine();
}

}  // namespace lowbit::ckpt
