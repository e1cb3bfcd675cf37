// A file of torch.save as it was before 1.6: five pickles, and then the storages, each with its
// number of elements before it.
#include "container/common/archive.h"
#include "container/common/open.h"
#include "container/pickled/globals.h"
#include "container/torch/tree.h"
#include "io/text.h"
#include "pickle/scan.h"

namespace lowbit::ckpt {
namespace {

constexpr size_t kMagicBytes = 15;  // the pickle of 0x1950a86a20f9469cfc6c in protocol 2

/// The storages lie behind the pickle that names them, so this only takes the names; where they lie
/// is found afterwards.
class NamedStorages : public Storages {
 public:
  explicit NamedStorages(uint64_t room) : room_(room) {}
  Result<Record> find(const StorageName& name, const std::string& what) override {
    const auto [known, is_new] = names_.emplace(name.key, name);
    if (!is_new && (known->second.dtype != name.dtype || known->second.count != name.count))
      return bad(what + ": its storage " + printable(name.key) + " has two types or sizes");
    const uint64_t bytes = name.count * width(name);
    if (bytes > room_) return bad(what + ": its storage is larger than the file");
    return Record{name.key, 0, 0, bytes, 0, false};
  }
  static uint64_t width(const StorageName& name) {
    return name.dtype == nullptr ? 1 : static_cast<uint64_t>(name.dtype->bytes);
  }
  const std::unordered_map<std::string, StorageName>& names() const { return names_; }

 private:
  uint64_t room_;
  std::unordered_map<std::string, StorageName> names_;
};

/// Tells where each storage lies, from its key.
class PlacedStorages : public Storages {
 public:
  Result<Record> find(const StorageName& name, const std::string& what) override {
    const auto known = records.find(name.key);
    if (known == records.end())
      return bad(what + ": its storage " + printable(name.key) + " is missing");
    return known->second;
  }
  std::unordered_map<std::string, Record> records;
};

/// The next pickle; moves `at` behind it.
Result<Pickle> next(const File& file, uint64_t& at, const Allowlist& allowed,
                    const std::string& what) {
  ASSIGN_OR_RETURN(bytes, pickle_at(file, at, kMaxPickle, what));
  at += bytes.size();
  return read_pickle(std::move(bytes), allowed, what);
}

/// Walks the storages in the file's order.
Status place(const File& file, uint64_t at, const Pickle& keys, const NamedStorages& named,
             PlacedStorages& placed, Archive& archive, const std::string& what) {
  if (!keys.is(keys.root, Kind::kList)) return bad(what + ": has no list of storages");
  for (const NodeId id : keys.items(keys.root)) {
    if (!keys.is(id, Kind::kString)) return bad(what + ": has a storage without a name");
    const std::string key(keys.text(id));
    const auto known = named.names().find(key);
    if (known == named.names().end())
      return bad(what + ": has the storage " + printable(key) + ", which no tensor uses");
    uint64_t count = 0;
    RETURN_IF_ERROR(file.read(at, &count, 8));
    at += 8;
    if (count != known->second.count)
      return bad(what + ": its storage " + printable(key) + " has " + std::to_string(count) +
                 " elements, its pickle says " + std::to_string(known->second.count));
    const uint64_t bytes = count * NamedStorages::width(known->second);
    if (bytes > file.size() - at)
      return damaged(what + ": is cut off inside its storage " + printable(key));
    const Record record{"storage " + key, 0, at, bytes, 0, false};
    if (!placed.records.emplace(key, record).second)
      return bad(what + ": has the storage " + printable(key) + " twice");
    archive.add(record);
    at += bytes;
  }
  return at == file.size() ? fine() : Status(bad(what + ": has bytes behind its last storage"));
}

}  // namespace

Result<Manifest> read_torch_legacy(const std::string& path) {
  ASSIGN_OR_RETURN(archive, Archive::open(path));
  const std::string& what = archive->what();
  ASSIGN_OR_RETURN(file, archive->file());
  const Allowlist none{{}, false};
  uint64_t at = kMagicBytes;
  ASSIGN_OR_RETURN(version, next(*file, at, none, what));
  if (!version.is(version.root, Kind::kInt) || version.integer(version.root) != 1001)
    return bad(what + ": is of a version of torch.save that is not known");
  ASSIGN_OR_RETURN(system, next(*file, at, none, what));
  const NodeId little = system.find(system.root, "little_endian");
  if (!system.is(little, Kind::kBool)) return bad(what + ": does not tell its byte order");
  if (system.integer(little) == 0) return bad(what + ": was written by a big-endian machine");
  ASSIGN_OR_RETURN(tree, next(*file, at, tree_globals(), what));
  ASSIGN_OR_RETURN(keys, next(*file, at, none, what));
  {
    Manifest first;
    ASSIGN_OR_RETURN(scratch, Archive::open(path));
    NamedStorages named(file->size());
    RETURN_IF_ERROR(read_tree(tree, named, *scratch, first));
    // Those of what is named and not read lie between the others.
    RETURN_IF_ERROR(for_storages(tree, [&](const StorageName& name) -> Status {
      ASSIGN_OR_RETURN(found, named.find(name, what));
      static_cast<void>(found);
      return fine();
    }));
    PlacedStorages placed;
    RETURN_IF_ERROR(place(*file, at, keys, named, placed, *archive, what));
    Manifest m;
    RETURN_IF_ERROR(read_tree(tree, placed, *archive, m));
    m.facts.push_back("written by torch before 1.6, or without its zip format: no checksums");
    archive->finish(archive, ContainerKind::kLegacy, m);
    return m;
  }
}

}  // namespace lowbit::ckpt
