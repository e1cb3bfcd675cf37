// A document into a DCP directory. Where every item lies is computed first; then threads take one
// leaf after the other, read it once in row-major order, and hand each chunk its elements.
#include <algorithm>
#include <map>
#include <mutex>

#include "container/common/item.h"
#include "container/common/strided.h"
#include "container/common/subclass_cut.h"
#include "container/common/torch_archive.h"
#include "container/common/writer.h"
#include "container/dcp/cut.h"
#include "container/dcp/dcp.h"
#include "container/dcp/digests.h"
#include "container/dcp/items.h"
#include "io/new_directory.h"
#include "io/parallel.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kMaxPiece = 1u << 20;  // that a core's cache holds

class DcpWriter {
 public:
  DcpWriter(const Document& from, const WriteOptions& options) : from_(from), options_(options) {
    threads_ = std::clamp(options.threads, 1, 256);
    // A thread holds one piece, a cut of it, and what waits in the items that are open.
    share_ = options.memory / static_cast<uint64_t>(threads_) / 4;
    piece_ = std::clamp<uint64_t>(share_, 1u << 16, kMaxPiece);
    mixed_ = from.manifest != nullptr && from.manifest->kind == ContainerKind::kDcp;
  }

  /// Where everything will lie, but for the values.
  Status plan() {
    RETURN_IF_ERROR(check_mesh(options_.mesh));
    const auto ranks = static_cast<size_t>(options_.mesh.ranks());
    for (size_t r = 0; r < ranks; ++r)
      to_.file_names.push_back("__" + std::to_string(r) + "_0.distcp");
    to_.has_paths = from_.manifest == nullptr || from_.manifest->has_paths;
    for (const Leaf& leaf : from_.leaves) {
      if (leaf.kind != Leaf::Kind::kTensor && !is_subclass(leaf)) {
        ++report_.values;
        continue;
      }
      RETURN_IF_ERROR(plan_tensor(leaf));
    }
    return fine();
  }

  Result<WriteReport> write(NewDirectory& folder, const std::string& path) {
    for (const std::string& name : to_.file_names) {
      ASSIGN_OR_RETURN(part, folder.part(name));
      files_.push_back(std::move(part));
    }
    RETURN_IF_ERROR(write_values());
    place_items();
    RETURN_IF_ERROR(
        parallel(to_.tensors.size(), threads_, [this](size_t i) { return write_tensor(i); }));
    RETURN_IF_ERROR(from_.finish());
    RETURN_IF_ERROR(parallel(files_.size(), threads_, [this](size_t i) -> Status {
      RETURN_IF_ERROR(files_[i]->sync());
      return options_.progress(done_, total_) ? fine() : Status(interrupted());
    }));
    if (options_.manifest) {
      ASSIGN_OR_RETURN(digests, folder.file("lowbit.json"));
      RETURN_IF_ERROR(write_digests(*digests, to_, digests_, value_digests_));
    }
    ASSIGN_OR_RETURN(metadata, folder.file(".metadata"));
    RETURN_IF_ERROR(metadata->write(metadata_bytes(to_, path)));
    RETURN_IF_ERROR(metadata->close());
    report_.unchecked = from_.unchecked();
    return report_;
  }

  const WriteReport& report() const { return report_; }

 private:
  /// The chunk of the source that has this box and can be copied as it is; null where none.
  const Chunk* same_chunk(const Leaf& leaf, const Box& box) const {
    if (!mixed_ || leaf.stored == nullptr) return nullptr;
    const auto& chunks = leaf.stored->chunks;
    auto c = std::partition_point(chunks.begin(), chunks.end(),
                                  [&](const Chunk& k) { return k.offset < box.offset; });
    for (; c != chunks.end() && c->offset == box.offset; ++c) {
      if (c->shape == box.shape && c->extent.transform == 0) return &*c;
    }
    return nullptr;
  }

  Status plan_tensor(const Leaf& leaf) {
    Tensor to{leaf.name(), leaf.path, leaf.dtype, leaf.shape, {}};
    bool anew = false;
    for (Cut& c : cut(leaf.shape, options_.mesh)) {
      Chunk chunk{std::move(c.box.offset), std::move(c.box.shape), {}};
      chunk.extent.file = static_cast<uint32_t>(c.rank);
      const Box box{chunk.offset, chunk.shape};
      if (const Chunk* same = same_chunk(leaf, box)) {
        chunk.extent.length = same->extent.length;
        if (is_subclass(leaf)) {
          ASSIGN_OR_RETURN(bytes, kept_bytes(*from_.manifest, *leaf.stored, *same));
          report_.bytes += bytes;
        }
        ++report_.copied;
      } else if (is_subclass(leaf)) {
        ASSIGN_OR_RETURN(item, subclass_item(leaf, box));
        ASSIGN_OR_RETURN(length, archive_length(item.archive));
        chunk.extent.length = length;
        report_.bytes += item.archive.bytes();
        report_.requantized += item.requantized;
        anew = true;
      } else {
        ASSIGN_OR_RETURN(length, length_of(*leaf.dtype, chunk.shape));
        chunk.extent.length = length;
        anew = true;
      }
      to.chunks.push_back(std::move(chunk));
    }
    report_.chunks += to.chunks.size();
    report_.recut += anew;
    if (!is_subclass(leaf)) report_.bytes += leaf.bytes();
    ++report_.tensors;
    total_ += leaf.bytes();
    leaf_of_.push_back(&leaf);
    digests_.emplace_back(to.chunks.size());
    to_.tensors.push_back(std::move(to));
    return fine();
  }

  struct SubclassItem {
    std::shared_ptr<Document> document;  // the archive points into it
    TorchArchive archive;
    bool requantized;
  };
  Result<SubclassItem> subclass_item(const Leaf& leaf, const Box& box) const {
    bool inside = false;
    auto part = cut_subclass(from_, leaf, box, inside);
    const bool anew = inside && leaf.recut;
    if (anew) part = leaf.recut(box);
    if (!part.ok()) return part.error();
    SubclassItem item{std::make_shared<Document>(), {}, anew};
    item.document->manifest = from_.manifest;
    item.document->leaves.push_back(std::move(part).value());
    ASSIGN_OR_RETURN(archive, torch_archive(*item.document));
    item.archive = std::move(archive);
    return item;
  }

  /// One chunk of a tensor subclass that is no item of the source.
  Status write_subclass(size_t i, size_t c) {
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
    digests_[i][c] = hash.hex();
    Output out(files_[chunk.extent.file], chunk.extent.offset, 1u << 16);
    ZipWriter zip(out);
    RETURN_IF_ERROR(
        write_archive(zip, item.archive, *item.document, piece_, [](uint64_t) { return fine(); }));
    RETURN_IF_ERROR(zip.close());
    RETURN_IF_ERROR(out.flush());
    return count(volume(chunk.shape) * static_cast<uint64_t>(leaf_of_[i]->dtype->bytes));
  }

  Result<uint64_t> length_of(const Dtype& dtype, const Shape& shape) {
    const auto [known, is_new] = lengths_.try_emplace({&dtype, shape});
    if (is_new) {
      ASSIGN_OR_RETURN(length, item_length(dtype, shape));
      known->second = length;
    }
    return known->second;
  }

  Status write_values() {
    Output out(files_[0], 0);
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
      if (!options_.progress(0, total_)) return interrupted();
    }
    values_end_ = out.position();
    return out.flush();
  }

  /// Items follow one another at multiples of 64, so that their data does too.
  void place_items() {
    std::vector<uint64_t> ends(files_.size(), 0);
    ends[0] = values_end_;
    for (Tensor& t : to_.tensors) {
      for (Chunk& c : t.chunks) {
        uint64_t& end = ends[c.extent.file];
        c.extent.offset = (end + 63) / 64 * 64;
        end = c.extent.offset + c.extent.length;
      }
    }
  }

  Status count(uint64_t bytes) {
    const std::lock_guard held(progress_lock_);
    done_ = std::min(total_, done_ + bytes);
    return options_.progress(done_, total_) ? fine() : Status(interrupted());
  }

  Status write_tensor(size_t i) {
    const Leaf& leaf = *leaf_of_[i];
    const Tensor& to = to_.tensors[i];
    std::vector<size_t> anew;
    for (size_t c = 0; c < to.chunks.size(); ++c) {
      const Chunk& chunk = to.chunks[c];
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
    std::sort(anew.begin(), anew.end(), [&](size_t a, size_t b) {
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

  Status write_band(size_t i, const Box& band, std::span<const size_t> chunks) {
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
          uint64_t first = 0;
          for (size_t d = 0; d < piece.offset.size(); ++d)
            first += static_cast<uint64_t>(piece.offset[d] * strides[d]);
          const uint64_t n = volume(piece.shape);
          read.resize(n * width);
          RETURN_IF_ERROR(leaf.source->read(first, n, read.data()));
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

  const Document& from_;
  const WriteOptions& options_;
  bool mixed_ = false;  // the source has items that may be copied
  int threads_ = 1;
  uint64_t share_ = 0, piece_ = kMaxPiece;  // of the memory
  Manifest to_;
  std::vector<const Leaf*> leaf_of_;               // of to_.tensors
  std::vector<std::vector<std::string>> digests_;  // of their chunks
  std::vector<std::string> value_digests_;         // of to_.blobs
  std::map<std::pair<const Dtype*, Shape>, uint64_t> lengths_;
  std::vector<std::shared_ptr<OutputFile>> files_;
  uint64_t values_end_ = 0;
  WriteReport report_;
  std::mutex progress_lock_;
  uint64_t done_ = 0, total_ = 0;
};

}  // namespace

Result<WriteReport> plan_dcp(const Document& document, const WriteOptions& options) {
  DcpWriter writer(document, options);
  RETURN_IF_ERROR(writer.plan());
  return writer.report();
}

Result<WriteReport> write_dcp(const Document& document, const std::string& path,
                              const WriteOptions& options) {
  DcpWriter writer(document, options);
  RETURN_IF_ERROR(writer.plan());
  ASSIGN_OR_RETURN(folder, NewDirectory::create(path, options.replace, document.sources()));
  ASSIGN_OR_RETURN(report, writer.write(*folder, path));
  RETURN_IF_ERROR(folder->commit());
  return report;
}

}  // namespace lowbit::ckpt
