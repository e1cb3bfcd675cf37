#include "container/dcp/dcp.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_set>

#include "container/common/open.h"
#include "container/manifest/tiling.h"
#include "container/pickled/item.h"
#include "io/hash.h"
#include "io/read/open.h"
#include "io/read/zstd.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kMaxMetadata = 1ull << 30;

/// What a value's item may unpack to; a tensor's is known by its shape.
constexpr uint64_t kMaxValue = 64u << 20;

class DcpContainer : public Container {
 public:
  DcpContainer(std::shared_ptr<Directory> folder, std::vector<std::string> names)
      : files_(std::move(folder)), names_(std::move(names)) {}

  FileSet& files() override { return files_; }

  Result<Stored> stored(const Tensor& tensor, const Chunk& chunk) override {
    const std::string what = files_.shown(chunk.extent.file) + ": " + printable(tensor.name) +
                             " at " + shape_text(chunk.offset);
    const uint64_t bytes = volume(chunk.shape) * static_cast<uint64_t>(tensor.dtype->bytes);
    ASSIGN_OR_RETURN(extent, unpacked(chunk.extent, bytes + (1u << 20), what));
    ASSIGN_OR_RETURN(file, files_.open(extent.file));
    ASSIGN_OR_RETURN(node, read_stored(*file, extent, what));
    if (node.shape != chunk.shape)
      return bad(what + ": the item has the shape " + shape_text(node.shape) +
                 ", the metadata says " + shape_text(chunk.shape));
    if (node.dtype != tensor.dtype)
      return bad(what + ": the item is " + node.dtype->name + ", the metadata says " +
                 tensor.dtype->name);
    return part_of(std::move(node.stored), tensor, what);
  }

  /// The first record of an archive is its pickle, and a subclass's names the function that makes
  /// one: the beginning of a packed item tells without unpacking all of it.
  Result<bool> seems_subclass(const Tensor&, const Chunk& chunk) override {
    if (chunk.extent.transform == 0) return true;
    ASSIGN_OR_RETURN(file, files_.open(chunk.extent.file));
    const auto head = zstd_beginning(*file, chunk.extent.offset, chunk.extent.length, 1u << 14);
    return !head.ok() || head.value().find("_rebuild_tensor") == std::string::npos ||
           head.value().find("_rebuild_from_type") != std::string::npos ||
           head.value().find("_rebuild_wrapper") != std::string::npos;
  }

  Result<Value> value(const Blob& blob) override {
    RETURN_IF_ERROR(check_single(blob));
    const std::string what = files_.shown(blob.extent.file) + ": " + printable(blob.name);
    ASSIGN_OR_RETURN(extent, plain(blob.extent, what));
    ASSIGN_OR_RETURN(file, files_.open(extent.file));
    return read_value(*file, extent, what);
  }

  Result<std::vector<Record>> records(const FileExtent& packed, const std::string& what) override {
    ASSIGN_OR_RETURN(extent, plain(packed, what));
    ASSIGN_OR_RETURN(file, files_.open(extent.file));
    ASSIGN_OR_RETURN(index, read_zip(*file, extent.offset, extent.length, what));
    std::vector<Record> out;
    for (const ZipRecord& r : index.records)
      out.push_back({r.name, extent.file, r.offset, r.size, r.crc, index.has_crcs});
    return out;
  }

  Result<FileExtent> plain(const FileExtent& extent, const std::string& what) override {
    return unpacked(extent, kMaxValue, what);
  }

 private:
  Result<FileExtent> unpacked(const FileExtent& packed, uint64_t limit, const std::string& what) {
    if (packed.transform == 0) return packed;
    FileExtent out;
    {
      const std::lock_guard held(lock_);
      const auto [known, is_new] = unpacked_.try_emplace({packed.file, packed.offset});
      if (is_new)
        known->second = files_.add_made(
            names_[packed.file], [this, packed, limit, what]() -> Result<std::shared_ptr<File>> {
              ASSIGN_OR_RETURN(file, files_.open(packed.file));
              return zstd_content(*file, packed.offset, packed.length, limit, what);
            });
      out.file = known->second;
    }
    ASSIGN_OR_RETURN(file, files_.open(out.file));
    out.length = file->size();
    return out;
  }

  FileSet files_;
  std::vector<std::string> names_;
  std::mutex lock_;
  std::map<std::pair<uint32_t, uint64_t>, uint32_t> unpacked_;  // by file and offset
};

Status check_transforms(const Manifest& m, const std::string& path) {
  for (const std::string& t : m.transforms) {
    if (t != "stream.zstd/1")
      return bad(path + ": items are stored as " + printable(t) +
                 ", which is not read (only stream.zstd/1 is); save it again without it");
  }
  return fine();
}

/// Opens every file that is named; items must lie inside it and not overlap.
Status check_items(Manifest& m, FileSet& files) {
  struct Item {
    FileExtent extent;
    const std::string* owner;
  };
  std::vector<Item> items;
  for (const Tensor& t : m.tensors) {
    for (const Chunk& c : t.chunks) items.push_back({c.extent, &t.name});
  }
  for (const Blob& b : m.blobs) {
    items.push_back({b.extent, &b.name});
    for (const FileExtent& extent : b.more) items.push_back({extent, &b.name});
  }
  std::ranges::sort(items, [](const Item& a, const Item& b) {
    return std::pair(a.extent.file, a.extent.offset) < std::pair(b.extent.file, b.extent.offset);
  });
  for (const std::string& name : m.file_names) RETURN_IF_ERROR(files.add(name));
  for (size_t i = 0; i < items.size(); ++i) {
    const FileExtent& p = items[i].extent;
    const auto what = [&] {
      return files.shown(p.file) + ": the item of " + printable(*items[i].owner);
    };
    const uint64_t size = files.size(p.file);
    if (p.offset > size || p.length > size - p.offset) {
      return damaged(what() + " is " + std::to_string(p.length) + " bytes at " +
                     std::to_string(p.offset) + " of a file of " + std::to_string(size) +
                     "; the file is cut off")
          .at(printable(*items[i].owner), files.name(p.file));
    }
    const FileExtent* before =
        i > 0 && items[i - 1].extent.file == p.file ? &items[i - 1].extent : nullptr;
    if (before != nullptr && before->offset + before->length > p.offset)
      return bad(what() + " overlaps that of " + printable(*items[i - 1].owner))
          .at(printable(*items[i].owner), files.name(p.file));
    const bool last = i + 1 == items.size() || items[i + 1].extent.file != p.file;
    if (last && size > p.offset + p.length)
      m.warnings.push_back(files.shown(p.file) + " has " +
                           std::to_string(size - p.offset - p.length) +
                           " bytes behind its last item");
  }
  return fine();
}

/// R for "__R" + end, -1 for other names.
int64_t rank_of(const std::string& name, std::string_view end = ".metadata") {
  constexpr std::string_view kStart = "__";
  if (!name.starts_with(kStart) || !name.ends_with(end)) return -1;
  if (name.size() <= kStart.size() + end.size()) return -1;
  int64_t rank = 0;
  for (size_t i = kStart.size(); i < name.size() - end.size(); ++i) {
    if (name[i] < '0' || name[i] > '9') return -1;
    rank = std::min<int64_t>(rank, INT32_MAX) * 10 + (name[i] - '0');
  }
  return rank;
}

/// The union of the files that ranks wrote each for itself.
Result<Manifest> read_ranks(const Directory& folder, const std::string& path) {
  ASSIGN_OR_RETURN(names, folder.list());
  std::vector<std::pair<int64_t, std::string>> ranks;
  for (const std::string& name : names) {
    if (rank_of(name) >= 0) ranks.emplace_back(rank_of(name), name);
  }
  if (ranks.empty()) {
    const bool torn =
        std::ranges::any_of(names, [](const std::string& n) { return n.ends_with(".distcp"); });
    return bad(path + (torn ? ": has no .metadata, which is written last: the save did not finish"
                            : ": is not a checkpoint folder: it has no .metadata "
                              "(torch.distributed.checkpoint) and no files of DeepSpeed"));
  }
  std::ranges::sort(ranks);
  Manifest all;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto& [rank, name] = ranks[i];
    if (rank != static_cast<int64_t>(i))
      return bad(path + ": has " + name + " but not __" + std::to_string(i) +
                 ".metadata; a rank's part is missing");
    ASSIGN_OR_RETURN(bytes, folder.content(name, kMaxMetadata));
    ASSIGN_OR_RETURN(part, parse_metadata(std::move(bytes), path + "/" + name));
    RETURN_IF_ERROR(join(all, std::move(part), path + "/" + name));
  }
  join_done(all);
  for (const std::string& name : names) {
    // "__R_N.distcp"
    const int64_t rank = rank_of(name.substr(0, name.find('_', 2)), "");
    if (name.ends_with(".distcp") && rank >= static_cast<int64_t>(ranks.size()))
      return bad(path + ": has " + printable(name) + " but not __" + std::to_string(rank) +
                 ".metadata; a rank's part is missing");
  }
  all.facts.push_back("metadata of " + std::to_string(ranks.size()) + " ranks, each its own");
  return all;
}

/// What lies in the folder and is not part of the checkpoint.
Status note_others(Manifest& m, const Directory& folder) {
  ASSIGN_OR_RETURN(names, folder.list());
  const std::unordered_set<std::string> known(m.file_names.begin(), m.file_names.end());
  const bool whole = folder.has(".metadata");
  for (const std::string& name : names) {
    if (name.ends_with(".distcp") && !known.contains(name)) {
      const auto file = folder.file(name);
      if (!file.ok() || file.value()->size() > 0)
        m.warnings.push_back(printable(name) + " is named nowhere; not read");
    } else if (whole && rank_of(name) >= 0) {
      m.warnings.push_back(printable(name) + " is left out: .metadata describes all ranks");
    } else if (name == ".metadata.tmp") {
      m.warnings.push_back("a save into this folder did not finish: .metadata.tmp is left over");
    }
  }
  return fine();
}

}  // namespace

Result<Manifest> read_dcp(const std::string& given) {
  ASSIGN_OR_RETURN(folder, open_folder(given));
  const std::string path = printable(given);
  Manifest m;
  if (folder->has(".metadata")) {
    ASSIGN_OR_RETURN(bytes, folder->content(".metadata", kMaxMetadata));
    std::string digest = digest_of(bytes);
    ASSIGN_OR_RETURN(whole, parse_metadata(std::move(bytes), path + "/.metadata"));
    m = std::move(whole);
    m.metadata_digest = std::move(digest);
  } else {
    ASSIGN_OR_RETURN(joined, read_ranks(*folder, path));
    m = std::move(joined);
  }
  RETURN_IF_ERROR(check_transforms(m, path));
  for (const Tensor& t : m.tensors) {
    if (Status s = check_tiling(t); !s.ok())
      return bad(path + ": " + s.error().text).at(printable(t.name), path + "/.metadata");
  }
  const auto container = std::make_shared<DcpContainer>(folder, m.file_names);
  RETURN_IF_ERROR(check_items(m, container->files()));
  RETURN_IF_ERROR(note_others(m, *folder));
  m.kind = ContainerKind::kDcp;
  m.path = given;
  m.container = container;
  return m;
}

}  // namespace lowbit::ckpt
