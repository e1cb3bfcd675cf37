#include "container/dcp/items.h"

#include <algorithm>

#include "container/manifest/record_reader.h"
#include "container/manifest/tensor_reader.h"
#include "container/pickled/item.h"
#include "io/text.h"

namespace lowbit::ckpt {

Result<uint64_t> item_length(const Dtype& dtype, const Shape& shape) {
  Output counter;
  ZipWriter zip(counter);
  RETURN_IF_ERROR(begin_tensor(zip, dtype, shape));
  RETURN_IF_ERROR(zip.skip(volume(shape) * static_cast<uint64_t>(dtype.bytes)));
  RETURN_IF_ERROR(finish_tensor(zip));
  return counter.position();
}

Result<std::string> write_value_item(const std::string& pickle, Output& to) {
  std::string bytes;
  Output item(&bytes);
  ZipWriter zip(item);
  RETURN_IF_ERROR(zip.record("data.pkl", pickle));
  RETURN_IF_ERROR(zip.close());
  Hash hash;
  hash.add(bytes.data(), bytes.size());
  RETURN_IF_ERROR(to.write(bytes));
  return hash.hex();
}

Status TensorItem::begin() {
  RETURN_IF_ERROR(begin_tensor(zip_, dtype_, box_.shape));
  return left_ == 0 ? add(nullptr, 0) : fine();
}

Status TensorItem::add(const char* data, uint64_t elements) {
  const uint64_t bytes = elements * static_cast<uint64_t>(dtype_.bytes);
  if (bytes > 0) {
    hash_.add(data, bytes);
    RETURN_IF_ERROR(zip_.data(data, bytes));
  }
  left_ -= elements;
  if (left_ > 0) return fine();
  RETURN_IF_ERROR(finish_tensor(zip_));
  return out_.flush();
}

Status ItemCopier::copy(const FileExtent& extent, const std::string& what, Output& to,
                        const Part* part, const Add& add,
                        const std::function<Status(uint64_t)>& done) {
  ASSIGN_OR_RETURN(records, from_.container->records(extent, what));
  std::ranges::sort(records, [](const Record& a, const Record& b) { return a.offset < b.offset; });
  ASSIGN_OR_RETURN(file, from_.container->files().open(extent.file));
  std::string buffer;
  size_t first = 0;  // record that ends behind `at`
  const uint64_t end = extent.offset + extent.length;
  for (uint64_t at = extent.offset; at < end; at += buffer.size()) {
    buffer.resize(std::min(piece_, end - at));
    RETURN_IF_ERROR(file->read(at, buffer.data(), buffer.size()));
    const uint64_t stop = at + buffer.size();
    for (size_t i = first; i < records.size() && records[i].offset < stop; ++i) {
      const Record& r = records[i];
      const uint64_t low = std::max(r.offset, at), high = std::min(r.offset + r.size, stop);
      if (low < high)
        RETURN_IF_ERROR(from_.container->reader().hold(
            r, low - r.offset, buffer.data() + (low - at), high - low, what));
      if (r.offset + r.size <= stop) first = i + 1;
    }
    const uint64_t low = part == nullptr ? at : std::max(part->begin, at),
                   high = part == nullptr ? stop : std::min(part->end, stop);
    if (low < high) add(buffer.data() + (low - at), high - low);
    RETURN_IF_ERROR(to.write(buffer));
    RETURN_IF_ERROR(done(buffer.size()));
  }
  return to.flush();
}

Result<ChunkDigest> ItemCopier::tensor(const Tensor& tensor, const Chunk& chunk, Output& to,
                                       const std::function<Status(uint64_t)>& done) {
  const auto element = static_cast<uint64_t>(tensor.dtype->bytes);
  const std::string what = printable(tensor.name) + " at " + shape_text(chunk.offset);
  ASSIGN_OR_RETURN(stored,
                   from_.container->stored(tensor, chunk));  // holds it against the metadata
  const bool plain = stored.cls.empty();
  ChunkHasher hasher(chunk.shape, element);
  if (plain && is_row_major(stored.parts[0].second)) {
    const Payload& p = stored.parts[0].second;
    const auto width = static_cast<uint64_t>(p.dtype->bytes);
    const uint64_t begin = p.record.offset + p.first * width;
    const Part part{begin, begin + volume(p.shape) * width};
    const auto add = [&](const char* data, uint64_t bytes) { hasher.add(data, bytes); };
    RETURN_IF_ERROR(copy(chunk.extent, what, to, &part, add, done));
    return hasher.digest();
  }
  RETURN_IF_ERROR(copy(chunk.extent, what, to, nullptr, [](const char*, uint64_t) {}, done));
  const auto add = [&](TensorReader& reader, const Tensor& t, const Box& box) {
    std::string buffer;
    const auto width = static_cast<uint64_t>(t.dtype->bytes);
    return for_pieces(box, std::max<uint64_t>(1, piece_ / width), [&](const Box& piece) -> Status {
      buffer.resize(volume(piece.shape) * width);
      RETURN_IF_ERROR(reader.read(t, piece, buffer.data()));
      hasher.add(buffer.data(), buffer.size());
      return fine();
    });
  };
  if (plain) {
    TensorReader reader(from_);
    RETURN_IF_ERROR(add(reader, tensor, {chunk.offset, chunk.shape}));
    return hasher.digest();
  }
  Hash hash;
  for (const auto& part : stored.parts) {
    const Payload& payload = part.second;
    hash.add(part.first.c_str(), part.first.size() + 1);
    std::string buffer;
    const Box whole{Shape(payload.shape.size(), 0), payload.shape};
    TensorReader reader(from_);
    const auto width = static_cast<uint64_t>(payload.dtype->bytes);
    RETURN_IF_ERROR(
        for_pieces(whole, std::max<uint64_t>(1, piece_ / width), [&](const Box& p) -> Status {
          buffer.resize(volume(p.shape) * width);
          RETURN_IF_ERROR(reader.read(payload, p, buffer.data(), what));
          hash.add(buffer.data(), buffer.size());
          return fine();
        }));
  }
  return ChunkDigest{hash.hex()};
}

Result<std::string> ItemCopier::value(const Blob& blob, Output& to) {
  RETURN_IF_ERROR(check_single(blob));
  const std::string what = printable(blob.name);
  ASSIGN_OR_RETURN(extent, from_.container->plain(blob.extent, what));
  Hash hash;
  const auto add = [&](const char* data, uint64_t bytes) { hash.add(data, bytes); };
  RETURN_IF_ERROR(copy(extent, what, to, nullptr, add, [](uint64_t) { return fine(); }));
  return hash.hex();
}

}  // namespace lowbit::ckpt
