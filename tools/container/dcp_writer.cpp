// A document into a DCP directory: items whose box stays are copied as they are, others are read
// and written anew.
#include <algorithm>

#include "container/dcp.h"
#include "container/item.h"
#include "container/writer.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kPiece = 4u << 20;  // bytes held at a time

Status copy_item(const Manifest& from, const Place& place, Output& to) {
  LB_TRY(file, from.container->files().open(place.file));
  std::string buffer;
  for (uint64_t at = 0; at < place.length; at += buffer.size()) {
    buffer.resize(std::min(kPiece, place.length - at));
    LB_CHECK(file->read(place.offset + at, buffer.data(), buffer.size()));
    LB_CHECK(to.write(buffer));
  }
  return fine();
}

class DcpWriter {
 public:
  DcpWriter(const Document& from, NewDirectory& folder, const WriteOptions& options)
      : from_(from), folder_(folder), options_(options) {
    for (const Leaf& leaf : from.leaves) {
      if (leaf.kind != Leaf::Kind::kTensor) continue;
      total_ += leaf.bytes();
    }
  }

  Result<WriteReport> write(const std::string& path) {
    to_.has_paths = from_.manifest == nullptr || from_.manifest->has_paths;
    tensor_of_.assign(from_.leaves.size(), SIZE_MAX);
    for (size_t i = 0; i < from_.leaves.size(); ++i) {
      const Leaf& leaf = from_.leaves[i];
      if (leaf.kind == Leaf::Kind::kSubclass)
        return failed(printable(leaf.name()) + ": a " + leaf.cls +
                      " is not written to a directory");
      if (leaf.kind != Leaf::Kind::kTensor) continue;
      tensor_of_[i] = to_.tensors.size();
      to_.tensors.push_back({leaf.name(), leaf.path, leaf.dtype, leaf.shape, {}});
    }
    for (int64_t rank = 0; rank < options_.mesh.ranks(); ++rank) LB_CHECK(write_rank(rank));
    LB_TRY(metadata, folder_.file(".metadata"));
    LB_CHECK(metadata->write(metadata_bytes(to_, path)));
    LB_CHECK(metadata->close());
    return report_;
  }

 private:
  Status write_rank(int64_t rank) {
    to_.file_names.push_back("__" + std::to_string(rank) + "_0.distcp");
    LB_TRY(file, folder_.file(to_.file_names.back()));
    if (rank == 0) {
      for (const Leaf& leaf : from_.leaves) {
        if (leaf.kind != Leaf::Kind::kTensor) LB_CHECK(write_value(leaf, *file));
      }
    }
    for (size_t i = 0; i < from_.leaves.size(); ++i) {
      if (tensor_of_[i] != SIZE_MAX)
        LB_CHECK(write_part(from_.leaves[i], to_.tensors[tensor_of_[i]], rank, *file));
    }
    return file->close();
  }

  Status write_value(const Leaf& leaf, Output& file) {
    const uint64_t start = file.position();
    if (leaf.blob != nullptr && leaf.blob->place.length > 0) {
      LB_CHECK(copy_item(*from_.manifest, leaf.blob->place, file));
    } else {
      PickleWriter pickle(2);
      ckpt::write_value(pickle, leaf.value);
      ZipWriter zip(file);
      LB_CHECK(zip.record("data.pkl", pickle.finish()));
      LB_CHECK(zip.close());
    }
    to_.blobs.push_back({leaf.name(), leaf.path, {0, 0, start, file.position() - start}});
    ++report_.values;
    return fine();
  }

  Status write_part(const Leaf& leaf, Tensor& to, int64_t rank, Output& file) {
    const int64_t ranks = options_.mesh.ranks();
    const int64_t n = leaf.shape.empty() ? 1 : leaf.shape[0], part = (n + ranks - 1) / ranks;
    const int64_t begin = leaf.shape.empty() ? 0 : std::min(rank * part, n);
    const int64_t end = leaf.shape.empty() ? (rank == 0 ? 1 : 0) : std::min(begin + part, n);
    if (begin == end && !(rank == 0 && n == 0))
      return fine();  // nothing of it is this rank's; an empty tensor keeps one box
    Chunk chunk{Shape(leaf.shape.size(), 0),
                leaf.shape,
                {static_cast<uint32_t>(rank), 0, file.position(), 0}};
    if (!leaf.shape.empty()) {
      chunk.offset[0] = begin;
      chunk.shape[0] = end - begin;
    }
    const Chunk* same = nullptr;
    if (leaf.stored != nullptr && from_.manifest->kind == ContainerKind::kDcp) {
      for (const Chunk& c : leaf.stored->chunks) {
        if (c.offset == chunk.offset && c.shape == chunk.shape && c.place.transform == 0) same = &c;
      }
    }
    const uint64_t bytes = volume(chunk.shape) * static_cast<uint64_t>(leaf.dtype->bytes);
    if (same != nullptr) {
      LB_CHECK(copy_item(*from_.manifest, same->place, file));
      ++report_.copied;
    } else {
      ZipWriter zip(file);
      LB_CHECK(begin_tensor(zip, *leaf.dtype, chunk.shape));
      const uint64_t row = n == 0 ? 0 : volume(leaf.shape) / static_cast<uint64_t>(n);
      LB_CHECK(
          for_elements(leaf, static_cast<uint64_t>(begin) * row, static_cast<uint64_t>(end) * row,
                       kPiece, [&](const char* data, uint64_t, uint64_t count) {
                         return zip.data(data, count * static_cast<uint64_t>(leaf.dtype->bytes));
                       }));
      LB_CHECK(finish_tensor(zip));
    }
    chunk.place.length = file.position() - chunk.place.offset;
    to.chunks.push_back(std::move(chunk));
    ++report_.chunks;
    report_.tensors += to.chunks.size() == 1;
    report_.bytes += bytes;
    return options_.progress(report_.bytes, total_) ? fine() : Status(interrupted());
  }

  const Document& from_;
  NewDirectory& folder_;
  const WriteOptions& options_;
  Manifest to_;
  std::vector<size_t> tensor_of_;
  WriteReport report_;
  uint64_t total_ = 0;
};

}  // namespace

Result<WriteReport> write_dcp(const Document& document, const std::string& path,
                              const WriteOptions& options) {
  LB_TRY(folder, NewDirectory::create(path, options.replace));
  LB_TRY(report, DcpWriter(document, *folder, options).write(path));
  LB_CHECK(folder->commit());
  return report;
}

}  // namespace lowbit::ckpt
