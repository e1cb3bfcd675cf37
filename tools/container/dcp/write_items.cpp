// The items of a DCP directory being written.
#include <algorithm>

#include "container/dcp/dcp_writer.h"
#include "container/dcp/items.h"
#include "container/document/subclass_cut.h"
#include "container/manifest/strided.h"
#include "container/pickled/item.h"
#include "io/parallel.h"
#include "io/text.h"

namespace lowbit::ckpt {

Status DcpWriter::write_tensors() {
  RETURN_IF_ERROR(
      parallel(to_.tensors.size(), threads_, [this](size_t i) { return write_tensor(i); }));
  return from_.finish();
}

Status DcpWriter::write_values(std::shared_ptr<OutputFile> file) {
  to_.blobs.clear();
  value_digests_.clear();
  Output out(std::move(file), 0);
  ItemCopier copier(from_.manifest != nullptr ? *from_.manifest : to_, piece_);
  for (const Leaf& leaf : from_.leaves) {
    if (leaf.kind == Leaf::Kind::kTensor || is_subclass(leaf)) continue;
    const uint64_t start = out.position();
    std::string digest;
    if (leaf.blob != nullptr && leaf.blob->extent.length > 0) {
      ASSIGN_OR_RETURN(copied, copier.value(*leaf.blob, out));
      digest = std::move(copied);
    } else {
      PickleWriter pickle(2);
      ckpt::write_value(pickle, leaf.value);
      ASSIGN_OR_RETURN(written, write_value_item(pickle.finish(), out));
      digest = std::move(written);
    }
    to_.blobs.push_back({leaf.name(), leaf.path, {0, 0, start, out.position() - start}, {}});
    value_digests_.push_back(std::move(digest));
    if (!options_.progress(0, total_)) return stopped();
  }
  values_end_ = out.position();
  return out.flush();
}

Status DcpWriter::write_tensor(size_t i) {
  const Leaf& leaf = *leaf_of_[i];
  const Tensor& to = to_.tensors[i];
  std::vector<size_t> anew;
  for (size_t c = 0; c < to.chunks.size(); ++c) {
    const Chunk& chunk = to.chunks[c];
    if (files_[chunk.extent.file] == nullptr) continue;
    const Chunk* same = same_chunk(leaf, {chunk.offset, chunk.shape});
    if (same == nullptr) {
      anew.push_back(c);
      continue;
    }
    Output out(files_[chunk.extent.file], chunk.extent.offset, 0);
    ItemCopier copier(*from_.manifest, piece_);
    ASSIGN_OR_RETURN(digest, copier.tensor(*leaf.stored, *same, out,
                                           [this](uint64_t bytes) { return count(bytes); }));
    digests_[i][c] = std::move(digest);
  }
  if (is_subclass(leaf)) {
    for (const size_t c : anew) RETURN_IF_ERROR(write_subclass(i, c));
    return fine();
  }
  if (leaf.shape.empty() || volume(leaf.shape) == 0)
    return anew.empty() ? fine() : write_band(i, {Shape(leaf.shape.size(), 0), leaf.shape}, anew);
  // Chunks that share their rows are filled together.
  std::ranges::sort(anew, [&](size_t a, size_t b) {
    return std::pair(to.chunks[a].offset[0], a) < std::pair(to.chunks[b].offset[0], b);
  });
  for (size_t begin = 0; begin < anew.size();) {
    const Chunk& first = to.chunks[anew[begin]];
    size_t end = begin + 1;
    while (end < anew.size() && to.chunks[anew[end]].offset[0] == first.offset[0]) ++end;
    Box band{Shape(leaf.shape.size(), 0), leaf.shape};
    band.offset[0] = first.offset[0];
    band.shape[0] = first.shape[0];
    RETURN_IF_ERROR(write_band(i, band, std::span(anew).subspan(begin, end - begin)));
    begin = end;
  }
  return fine();
}

Status DcpWriter::write_band(size_t i, const Box& band, std::span<const size_t> chunks) {
  const Leaf& leaf = *leaf_of_[i];
  const Tensor& to = to_.tensors[i];
  const auto width = static_cast<uint64_t>(leaf.dtype->bytes);
  const uint64_t buffer = std::clamp<uint64_t>(share_ / chunks.size(), 512, 1u << 18);
  std::vector<std::unique_ptr<TensorItem>> items;
  for (const size_t c : chunks) {
    const Chunk& chunk = to.chunks[c];
    items.push_back(std::make_unique<TensorItem>(files_[chunk.extent.file], chunk.extent.offset,
                                                 buffer, *leaf.dtype,
                                                 Box{chunk.offset, chunk.shape}));
    RETURN_IF_ERROR(items.back()->begin());
  }
  const Shape strides = row_major(leaf.shape);
  std::string read, taken;
  RETURN_IF_ERROR(
      for_pieces(band, std::max<uint64_t>(1, piece_ / width), [&](const Box& piece) -> Status {
        const uint64_t n = volume(piece.shape);
        read.resize(n * width);
        RETURN_IF_ERROR(leaf.source->read(position(piece.offset, strides), n, read.data()));
        for (const auto& item : items) {
          const Box common = common_box(piece, item->box());
          const uint64_t part = volume(common.shape);
          if (part == n) {
            RETURN_IF_ERROR(item->add(read.data(), n));
          } else if (part > 0) {
            taken.resize(part * width);
            copy_box(read.data(), piece, common, taken.data(), width);
            RETURN_IF_ERROR(item->add(taken.data(), part));
          }
        }
        return count(n * width);
      }));
  for (size_t c = 0; c < chunks.size(); ++c) digests_[i][chunks[c]] = items[c]->digest();
  return fine();
}

Status DcpWriter::write_subclass(size_t i, size_t c) {
  const Chunk& chunk = to_.tensors[i].chunks[c];
  ASSIGN_OR_RETURN(item, subclass_item(*leaf_of_[i], {chunk.offset, chunk.shape}));
  // The digest is that of its parts, each after its name and a zero byte; of a plain one, its
  // own.
  Hash hash;
  const Leaf& whole = item.document->leaves[0];
  const bool plain = whole.kind == Leaf::Kind::kTensor;
  for (const Leaf& part : plain ? std::span(&whole, 1) : std::span(whole.parts)) {
    const std::string name = plain ? "" : part.path[0].text();
    if (!plain) hash.add(name.c_str(), name.size() + 1);
    const auto width = static_cast<uint64_t>(part.dtype->bytes);
    RETURN_IF_ERROR(for_elements(part, 0, volume(part.shape), piece_,
                                 [&](const char* data, uint64_t, uint64_t n) -> Status {
                                   hash.add(data, n * width);
                                   return fine();
                                 }));
  }
  digests_[i][c] = {hash.hex()};
  Output out(files_[chunk.extent.file], chunk.extent.offset, 1u << 16);
  ZipWriter zip(out);
  RETURN_IF_ERROR(
      write_archive(zip, item.archive, *item.document, piece_, [](uint64_t) { return fine(); }));
  RETURN_IF_ERROR(zip.close());
  RETURN_IF_ERROR(out.flush());
  return count(volume(chunk.shape) * static_cast<uint64_t>(leaf_of_[i]->dtype->bytes));
}

Error DcpWriter::stopped() const {
  if (pieces_.empty()) return interrupted();
  return failed("interrupted; what parts wrote lies in " + printable(pieces_) +
                ": run this part again, or remove that folder");
}

Status DcpWriter::count(uint64_t bytes) {
  const std::lock_guard held(progress_lock_);
  done_ = std::min(total_, done_ + bytes);
  return options_.progress(done_, total_) ? fine() : Status(stopped());
}

}  // namespace lowbit::ckpt
