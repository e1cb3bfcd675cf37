#include "pipeline/reshard.h"

#include <algorithm>

#include "container/dcp.h"
#include "container/item.h"
#include "pipeline/rows.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kPiece = 4u << 20;  // bytes held at a time

/// Copies an item as it is.
Status copy_item(const File& from, const Place& place, Output& to) {
  std::string buffer;
  for (uint64_t at = 0; at < place.length; at += buffer.size()) {
    buffer.resize(std::min(kPiece, place.length - at));
    LB_CHECK(from.read(place.offset + at, buffer.data(), buffer.size()));
    LB_CHECK(to.write(buffer));
  }
  return fine();
}

/// Calls `use` with the rows [begin, end) of a tensor in pieces.
template <class Use>
Status for_pieces(RowReader& reader, const Tensor& tensor, int64_t begin, int64_t end,
                  const Use& use) {
  const uint64_t row = RowReader::row_bytes(tensor);
  if (row == 0 || begin == end) return fine();
  const auto at_once = static_cast<int64_t>(std::max<uint64_t>(1, kPiece / row));
  std::string buffer;
  for (int64_t at = begin; at < end; at += at_once) {
    const int64_t stop = std::min(at + at_once, end);
    buffer.resize(static_cast<uint64_t>(stop - at) * row);
    LB_CHECK(reader.read(tensor, at, stop, buffer.data()));
    LB_CHECK(use(buffer));
  }
  return fine();
}

}  // namespace

uint64_t tensor_bytes(const Manifest& m) {
  uint64_t bytes = 0;
  for (const Tensor& t : m.tensors)
    bytes += static_cast<uint64_t>(RowReader::rows(t)) * RowReader::row_bytes(t);
  return bytes;
}

Result<ReshardReport> reshard(const Manifest& from, const std::string& path, int64_t ranks,
                              bool replace, const Progress& progress) {
  LB_TRY(folder, NewDirectory::create(path, replace));
  ReshardReport report{.tensors = from.tensors.size(), .blobs = from.blobs.size()};
  const uint64_t total = tensor_bytes(from);
  Manifest to;
  to.has_paths = from.has_paths;
  to.paths = from.paths;
  for (const Tensor& t : from.tensors) to.tensors.push_back({t.name, t.dtype, t.shape, {}});
  RowReader reader(from);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const std::string name = "__" + std::to_string(rank) + "_0.distcp";
    LB_TRY(file, folder->file(name));
    if (rank == 0) {
      for (const Blob& blob : from.blobs) {
        const uint64_t start = file->position();
        LB_CHECK(copy_item(*from.files.at(blob.place.file), blob.place, *file));
        to.blobs.push_back({blob.name, {name, start, file->position() - start}});
      }
    }
    for (size_t i = 0; i < from.tensors.size(); ++i) {
      const Tensor& tensor = from.tensors[i];
      const int64_t n = RowReader::rows(tensor), part = (n + ranks - 1) / ranks;
      const int64_t begin = tensor.shape.empty() ? 0 : std::min(rank * part, n);
      const int64_t end = tensor.shape.empty() ? (rank == 0 ? 1 : 0) : std::min(begin + part, n);
      if (begin == end && !(rank == 0 && n == 0))
        continue;  // nothing of it is this rank's; an empty tensor keeps one box
      Chunk chunk{Shape(tensor.shape.size(), 0), tensor.shape, {name, file->position(), 0}};
      if (!tensor.shape.empty()) {
        chunk.offset[0] = begin;
        chunk.shape[0] = end - begin;
      }
      const auto same = std::find_if(
          tensor.chunks.begin(), tensor.chunks.end(),
          [&](const Chunk& c) { return c.offset == chunk.offset && c.shape == chunk.shape; });
      if (same != tensor.chunks.end()) {
        LB_CHECK(for_pieces(reader, tensor, begin, std::min(begin + 1, end),
                            [](const std::string&) { return fine(); }));  // checks the item
        LB_CHECK(copy_item(*from.files.at(same->place.file), same->place, *file));
        ++report.copied;
      } else {
        ZipWriter zip(*file);
        LB_CHECK(begin_tensor(zip, *tensor.dtype, chunk.shape));
        LB_CHECK(for_pieces(reader, tensor, begin, end, [&](const std::string& bytes) {
          return zip.data(bytes.data(), bytes.size());
        }));
        LB_CHECK(finish_tensor(zip));
      }
      chunk.place.length = file->position() - chunk.place.offset;
      report.bytes += static_cast<uint64_t>(end - begin) * RowReader::row_bytes(tensor);
      ++report.chunks;
      to.tensors[i].chunks.push_back(std::move(chunk));
      progress(report.bytes, total);
    }
    LB_CHECK(file->close());
  }
  LB_TRY(metadata, folder->file(".metadata"));
  LB_CHECK(metadata->write(metadata_bytes(to, path)));
  LB_CHECK(metadata->close());
  LB_CHECK(folder->commit());
  return report;
}

}  // namespace lowbit::ckpt
