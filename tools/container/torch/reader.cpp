// A file of torch.save as it is since 1.6: a zip with a pickle, and a record for each storage.
#include <algorithm>
#include <set>
#include <string_view>
#include <unordered_map>

#include "container/common/archive.h"
#include "container/common/open.h"
#include "container/pickled/globals.h"
#include "container/pickled/tensor_node.h"
#include "container/torch/tree.h"
#include "container/zip/zip.h"
#include "io/read/buffered_file.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

class ZipStorages : public Storages {
 public:
  explicit ZipStorages(const ZipIndex& index) : has_crcs_(index.has_crcs) {
    records_.reserve(index.records.size());
    for (const ZipRecord& r : index.records) records_.emplace(r.name, Known{&r});
  }
  const ZipRecord* record(const std::string& name) const {
    const auto known = records_.find(name);
    return known == records_.end() ? nullptr : known->second.record;
  }
  Result<Record> find(const StorageName& name, const std::string& what) override {
    const auto found = records_.find("data/" + name.key);
    if (found == records_.end())
      return bad(what + ": its record data/" + printable(name.key) + " is missing");
    Known& known = found->second;
    // Without a type it is bytes, which any tensor may take its own way.
    if (known.used && known.dtype != name.dtype && known.dtype != nullptr && name.dtype != nullptr)
      return bad(what + ": its storage " + printable(name.key) + " has two types");
    if (!known.used) known.dtype = name.dtype;
    known.used = true;
    const ZipRecord& r = *known.record;
    return Record{r.name, 0, r.offset, r.size, r.crc, has_crcs_};
  }
  /// Whether a record, such as data/3, is a storage that was found.
  bool is_used(const std::string& name) const {
    const auto known = records_.find(name);
    return known != records_.end() && known->second.used;
  }

 private:
  struct Known {
    const ZipRecord* record;
    const Dtype* dtype = nullptr;  // of the first tensor that uses it
    bool used = false;
  };
  bool has_crcs_;
  std::unordered_map<std::string_view, Known> records_;  // names lie in the index
};

Result<std::string> content(const File& file, const ZipIndex& index, const ZipRecord& record,
                            uint64_t limit, const std::string& what) {
  if (record.size > limit)
    return too_large(what + ": its " + record.name + " has " + std::to_string(record.size) +
                     " bytes, more than the limit of " + std::to_string(limit));
  RETURN_IF_ERROR(check_crc(file, index, record, what));
  std::string bytes(record.size, '\0');
  RETURN_IF_ERROR(file.read(record.offset, bytes.data(), bytes.size()));
  return bytes;
}

Status check_small_records(const File& file, const ZipIndex& index, const ZipStorages& storages,
                           const std::string& what) {
  if (const ZipRecord* order = storages.record("byteorder")) {
    ASSIGN_OR_RETURN(text, content(file, index, *order, 16, what));
    if (text == "big") return bad(what + ": was written by a big-endian machine");
    if (text != "little") return bad(what + ": has the byte order " + printable(text));
  }
  const ZipRecord* version = storages.record("version");
  if (version == nullptr) return bad(what + ": has no version record, so torch did not write it");
  ASSIGN_OR_RETURN(text, content(file, index, *version, 16, what));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  const bool digits = !text.empty() && text.size() < 3 &&
                      std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
  if (!digits || std::stoi(text) < 1 || std::stoi(text) > 10)
    return bad(what + ": has the version " + printable(text) + ", which is not known");
  return fine();
}

/// What torch::save in C++ makes of an optimizer of lowbit's: a TorchScript program whose only
/// tensor is the file that lowbit::save writes.
Result<ZipIndex> inside_program(const File& file, const ZipIndex& program,
                                const std::string& what) {
  const ZipRecord* inner = program.find("data/0");
  char begin[4] = {};
  if (inner != nullptr && program.find("data/1") == nullptr && inner->size > sizeof begin)
    RETURN_IF_ERROR(file.read(inner->offset, begin, sizeof begin));
  if (std::string_view(begin, sizeof begin) != "PK\3\4")
    return bad(
        what +
        ": is a TorchScript program, not a checkpoint; load it with torch.jit.load and save its "
        "state_dict()");
  RETURN_IF_ERROR(check_crc(file, program, *inner, what));
  return read_zip(file, inner->offset, inner->size, what);
}

/// A file of torch.save that is a record of another zip.
Result<ZipIndex> inside_zip(const File& file, const std::string& member, const std::string& what) {
  ASSIGN_OR_RETURN(outer, read_loose_zip(file, what));
  const ZipRecord* inner = outer.find(member);
  if (inner == nullptr) return bad(what + ": has no record " + printable(member));
  RETURN_IF_ERROR(check_crc(file, outer, *inner, what));
  return read_zip(file, inner->offset, inner->size, what + "/" + printable(member));
}

/// What the index of a file, or of a part of it, leads to.
Result<Manifest> read_indexed(const std::shared_ptr<Archive>& archive, const File& file,
                              const ZipIndex& index) {
  const std::string& what = archive->what();
  ZipStorages storages(index);
  const ZipRecord* data = storages.record("data.pkl");
  if (data == nullptr) return bad(what + ": is a zip, but not of torch.save (it has no data.pkl)");
  RETURN_IF_ERROR(check_small_records(file, index, storages, what));
  ASSIGN_OR_RETURN(bytes, content(file, index, *data, kMaxPickle, what));
  ASSIGN_OR_RETURN(pickle, read_pickle(std::move(bytes), tree_globals(), what));
  Manifest m;
  RETURN_IF_ERROR(read_tree(pickle, storages, *archive, m));
  if (!index.has_crcs) m.facts.push_back("no checksums were computed");
  std::set<std::string> hidden;  // storages of what is named and not read
  RETURN_IF_ERROR(for_storages(pickle, [&](const StorageName& name) {
    if (!storages.is_used("data/" + name.key)) hidden.insert(name.key);
    return fine();
  }));
  const bool opaque = std::ranges::any_of(
      m.blobs, [](const Blob& blob) { return blob.value && blob.value->is_opaque(); });
  if (!hidden.empty() && opaque)
    m.facts.push_back(std::to_string(hidden.size()) +
                      " tensors belong to opaque objects and are not read");
  size_t unknown = 0;
  for (const ZipRecord& r : index.records) {
    archive->add(Record{r.name, 0, r.offset, r.size, r.crc, index.has_crcs});
    static constexpr std::string_view kKnown[] = {
        "data.pkl",  ".format_version", ".storage_alignment",
        "byteorder", "version",         ".data/serialization_id"};
    if (r.name.starts_with("data/") && hidden.contains(r.name.substr(5))) continue;
    if (r.name.starts_with("data/") && !storages.is_used(r.name)) {
      m.warnings.push_back("no tensor uses the record " + printable(r.name));
    } else if (!r.name.starts_with("data/") &&
               std::ranges::find(kKnown, r.name) == std::end(kKnown)) {
      if (unknown++ < 3)
        m.warnings.push_back("has an unknown record " + printable(r.name) + "; not read");
    }
  }
  if (unknown > 3)
    m.warnings.push_back("has " + std::to_string(unknown - 3) + " more unknown records; not read");
  archive->finish(archive, ContainerKind::kTorch, m);
  return m;
}

}  // namespace

Result<Manifest> read_torch_zip(const std::string& path, const std::string& member) {
  ASSIGN_OR_RETURN(archive, Archive::open(path));
  return read_torch_zip(archive, member);
}

Result<Manifest> read_torch_zip(std::shared_ptr<Archive> archive, const std::string& member) {
  const std::string& what = archive->what();
  ASSIGN_OR_RETURN(file, archive->file());
  ASSIGN_OR_RETURN(
      index, member.empty() ? read_zip(BufferedFile(*file, 0, file->size()), 0, file->size(), what)
                            : inside_zip(*file, member, what));
  if (index.find("constants.pkl") != nullptr) {
    ASSIGN_OR_RETURN(inner, inside_program(*file, index, what));
    index = std::move(inner);
  }
  return read_indexed(archive, *file, index);
}

Result<Manifest> read_torch_item(std::shared_ptr<Archive> archive, const FileExtent& item) {
  ASSIGN_OR_RETURN(file, archive->file());
  ASSIGN_OR_RETURN(index, read_zip(*file, item.offset, item.length, archive->what()));
  return read_indexed(archive, *file, index);
}

}  // namespace lowbit::ckpt
