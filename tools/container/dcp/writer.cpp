// A document into a DCP directory: where everything lies, and the whole.
#include <algorithm>

#include "container/dcp/cut.h"
#include "container/dcp/dcp.h"
#include "container/dcp/dcp_writer.h"
#include "container/dcp/digests.h"
#include "container/dcp/items.h"
#include "container/dcp/key_kinds.h"
#include "container/document/subclass_cut.h"
#include "io/parallel.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kMaxPiece = 1u << 20;  // that a core's cache holds

}  // namespace

DcpWriter::DcpWriter(const Document& from, const WriteOptions& options)
    : from_(from), options_(options) {
  threads_ = std::clamp(options.threads, 1, 256);
  // A thread holds one piece, a cut of it, and what waits in the items that are open.
  share_ = options.memory / static_cast<uint64_t>(threads_) / 4;
  piece_ = std::clamp<uint64_t>(share_, 1u << 16, kMaxPiece);
  mixed_ = from.manifest != nullptr && from.manifest->kind == ContainerKind::kDcp;
}

Status DcpWriter::plan() {
  RETURN_IF_ERROR(check_mesh(options_.mesh));
  const auto ranks = static_cast<size_t>(options_.mesh.ranks());
  for (size_t r = 0; r < ranks; ++r)
    to_.file_names.push_back("__" + std::to_string(r) + "_" + std::to_string(options_.file_number) +
                             ".distcp");
  to_.has_paths = from_.manifest == nullptr || from_.manifest->has_paths;
  to_.tells_keys = from_.manifest == nullptr || from_.manifest->tells_keys;
  KeyKinds kinds;
  for (const Leaf& leaf : from_.leaves) {
    if (to_.has_paths) RETURN_IF_ERROR(kinds.add(leaf.path));
    if (leaf.kind != Leaf::Kind::kTensor && !is_subclass(leaf)) {
      ++report_.values;
      continue;
    }
    RETURN_IF_ERROR(plan_tensor(leaf));
  }
  return fine();
}

const Chunk* DcpWriter::same_chunk(const Leaf& leaf, const Box& box) const {
  if (!mixed_ || leaf.stored == nullptr) return nullptr;
  const auto& chunks = leaf.stored->chunks;
  auto c =
      std::ranges::partition_point(chunks, [&](const Chunk& k) { return k.offset < box.offset; });
  for (; c != chunks.end() && c->offset == box.offset; ++c) {
    if (c->shape == box.shape && c->extent.transform == 0) return &*c;
  }
  return nullptr;
}

Status DcpWriter::plan_tensor(const Leaf& leaf) {
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

Result<DcpWriter::SubclassItem> DcpWriter::subclass_item(const Leaf& leaf, const Box& box) const {
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

Result<uint64_t> DcpWriter::length_of(const Dtype& dtype, const Shape& shape) {
  const auto [known, is_new] = lengths_.try_emplace({&dtype, shape});
  if (is_new) {
    ASSIGN_OR_RETURN(length, item_length(dtype, shape));
    known->second = length;
  }
  return known->second;
}

void DcpWriter::place_items() {
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

Result<WriteReport> DcpWriter::write(NewDirectory& folder, const std::string& path) {
  for (const std::string& name : to_.file_names) {
    ASSIGN_OR_RETURN(part, folder.part(name));
    files_.push_back(std::move(part));
  }
  RETURN_IF_ERROR(write_values(files_[0]));
  place_items();
  RETURN_IF_ERROR(write_tensors());
  RETURN_IF_ERROR(parallel(files_.size(), threads_, [this](size_t i) -> Status {
    RETURN_IF_ERROR(files_[i]->sync());
    return count(0);  // one thread at a time
  }));
  const std::string content =
      metadata_bytes(to_, options_.published_as.empty() ? path : options_.published_as);
  if (options_.manifest) {
    ASSIGN_OR_RETURN(digests, folder.file("lowbit.json"));
    RETURN_IF_ERROR(write_digests(*digests, to_, digest_of(content), digests_, value_digests_));
  }
  ASSIGN_OR_RETURN(metadata, folder.file(".metadata"));
  RETURN_IF_ERROR(metadata->write(content));
  RETURN_IF_ERROR(metadata->close());
  report_.unchecked = from_.unchecked();
  return report_;
}

Result<WriteReport> plan_dcp(const Document& document, const WriteOptions& options) {
  DcpWriter writer(document, options);
  RETURN_IF_ERROR(writer.plan());
  return writer.report();
}

Result<WriteReport> write_dcp(const Document& document, const std::string& path,
                              const WriteOptions& options) {
  if (options.part) {
    DcpWriter writer(document, options);
    RETURN_IF_ERROR(writer.plan());
    return writer.write_part(path);
  }
  ASSIGN_OR_RETURN(folder, NewDirectory::create(path, options.replace, NewDirectory::Kind::kDcp,
                                                document.sources()));
  WriteOptions named = options;
  named.file_number = folder->number().value_or(options.file_number);
  DcpWriter writer(document, named);
  RETURN_IF_ERROR(writer.plan());
  ASSIGN_OR_RETURN(report, writer.write(*folder, path));
  RETURN_IF_ERROR(folder->commit());
  return report;
}

}  // namespace lowbit::ckpt
