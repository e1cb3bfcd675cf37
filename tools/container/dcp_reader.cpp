#include "container/dcp.h"

#include <algorithm>

#include "container/item.h"
#include "container/open.h"
#include "container/tiling.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kMostMetadata = 1ull << 30;

class DcpContainer : public Container {
 public:
  DcpContainer(std::shared_ptr<Directory> folder, std::vector<std::string> transforms)
      : files_(std::move(folder)), transforms_(std::move(transforms)) {}

  FileSet& files() override { return files_; }

  Result<Stored> stored(const Tensor& tensor, const Chunk& chunk) override {
    const std::string what = files_.name(chunk.place.file) + ": " + printable(tensor.name) +
                             " at " + shape_text(chunk.offset);
    LB_TRY(file, open(chunk.place, what));
    LB_TRY(payload, read_payload(*file, chunk.place, what));
    if (payload.shape != chunk.shape)
      return bad(what + ": the item has the shape " + shape_text(payload.shape) +
                 ", the metadata says " + shape_text(chunk.shape));
    if (payload.dtype != tensor.dtype)
      return bad(what + ": the item is " + payload.dtype->name + ", the metadata says " +
                 tensor.dtype->name);
    Stored out;
    out.parts.emplace_back("", std::move(payload));
    return out;
  }

  Result<Value> value(const Blob& blob) override {
    const std::string what = files_.name(blob.place.file) + ": " + printable(blob.name);
    LB_TRY(file, open(blob.place, what));
    return read_value(*file, blob.place, what);
  }

  Result<std::vector<Record>> records(const Place& place, const std::string& what) override {
    LB_TRY(file, open(place, what));
    LB_TRY(index, read_zip(*file, place.offset, place.length, what));
    std::vector<Record> out;
    for (const ZipRecord& r : index.records)
      out.push_back({r.name, place.file, r.offset, r.size, r.crc, index.has_crcs});
    return out;
  }

 private:
  Result<std::shared_ptr<const File>> open(const Place& place, const std::string& what) {
    if (place.transform != 0)
      return bad(what + ": is stored as " + printable(transforms_[place.transform - 1]) +
                 ", which this version does not read; save it again without a transform");
    return files_.open(place.file);
  }
  FileSet files_;
  std::vector<std::string> transforms_;
};

/// Opens every file that is named; items must lie inside it and not overlap.
Status check_items(const Manifest& m, FileSet& files) {
  struct Item {
    Place place;
    const std::string* owner;
  };
  std::vector<Item> items;
  for (const Tensor& t : m.tensors) {
    for (const Chunk& c : t.chunks) items.push_back({c.place, &t.name});
  }
  for (const Blob& b : m.blobs) items.push_back({b.place, &b.name});
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return std::pair(a.place.file, a.place.offset) < std::pair(b.place.file, b.place.offset);
  });
  for (const std::string& name : m.file_names) LB_CHECK(files.add(name));
  for (size_t i = 0; i < items.size(); ++i) {
    const Place& p = items[i].place;
    const std::string what = files.name(p.file) + ": the item of " + printable(*items[i].owner);
    const uint64_t size = files.size(p.file);
    if (p.offset > size || p.length > size - p.offset) {
      return bad(what + " is " + std::to_string(p.length) + " bytes at " +
                 std::to_string(p.offset) + " of a file of " + std::to_string(size) +
                 "; the file is cut off")
          .at(printable(*items[i].owner), files.name(p.file));
    }
    const Place* before =
        i > 0 && items[i - 1].place.file == p.file ? &items[i - 1].place : nullptr;
    if (before != nullptr && before->offset + before->length > p.offset)
      return bad(what + " overlaps that of " + printable(*items[i - 1].owner))
          .at(printable(*items[i].owner), files.name(p.file));
  }
  return fine();
}

/// R for "__R.metadata", -1 for other names.
int64_t rank_of(const std::string& name) {
  constexpr std::string_view kStart = "__", kEnd = ".metadata";
  if (!name.starts_with(kStart) || !name.ends_with(kEnd)) return -1;
  if (name.size() <= kStart.size() + kEnd.size() || name.size() > 18) return -1;
  int64_t rank = 0;
  for (size_t i = kStart.size(); i < name.size() - kEnd.size(); ++i) {
    if (name[i] < '0' || name[i] > '9') return -1;
    rank = rank * 10 + (name[i] - '0');
  }
  return rank;
}

/// The union of the files that ranks wrote each for itself.
Result<Manifest> read_ranks(const Directory& folder, const std::string& path) {
  LB_TRY(names, folder.list());
  std::vector<std::pair<int64_t, std::string>> ranks;
  for (const std::string& name : names) {
    if (rank_of(name) >= 0) ranks.emplace_back(rank_of(name), name);
  }
  if (ranks.empty()) {
    const bool torn = std::any_of(names.begin(), names.end(),
                                  [](const std::string& n) { return n.ends_with(".distcp"); });
    return bad(path + (torn ? ": has no .metadata, which is written last: the save did not finish"
                            : ": is not a checkpoint of torch.distributed.checkpoint (it has no "
                              ".metadata)"));
  }
  std::sort(ranks.begin(), ranks.end());
  Manifest all;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto& [rank, name] = ranks[i];
    if (rank != static_cast<int64_t>(i))
      return bad(path + ": has " + name + " but not __" + std::to_string(i) +
                 ".metadata; a rank's part is missing");
    LB_TRY(bytes, folder.content(name, kMostMetadata));
    LB_TRY(part, parse_metadata(std::move(bytes), path + "/" + name));
    LB_CHECK(join(all, std::move(part), path + "/" + name));
  }
  all.facts.push_back("metadata of " + std::to_string(ranks.size()) + " ranks, each its own");
  return all;
}

}  // namespace

Result<Manifest> read_dcp(const std::string& given) {
  LB_TRY(folder, Directory::open(given));
  const std::string path = printable(given);
  Manifest m;
  if (folder->has(".metadata")) {
    LB_TRY(bytes, folder->content(".metadata", kMostMetadata));
    LB_TRY(whole, parse_metadata(std::move(bytes), path + "/.metadata"));
    m = std::move(whole);
  } else {
    LB_TRY(joined, read_ranks(*folder, path));
    m = std::move(joined);
  }
  for (const Tensor& t : m.tensors) {
    if (Status s = check_tiling(t); !s.ok())
      return bad(path + ": " + s.error().text).at(printable(t.name), path + "/.metadata");
  }
  const auto container = std::make_shared<DcpContainer>(folder, m.transforms);
  LB_CHECK(check_items(m, container->files()));
  m.kind = ContainerKind::kDcp;
  m.path = given;
  m.container = container;
  return m;
}

}  // namespace lowbit::ckpt
