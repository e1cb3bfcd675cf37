// `.metadata` to a manifest.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "container/dcp/dcp.h"
#include "container/dcp/key_kinds.h"
#include "container/dcp/metadata_pickle.h"
#include "io/text.h"
#include "pickle/plain.h"
#include "pickle/reader.h"

namespace lowbit::ckpt {
namespace {

/// Makes a manifest of the pickle.
class Parser : MetadataPickle {
 public:
  using MetadataPickle::MetadataPickle;

  Result<Manifest> parse() {
    ASSIGN_OR_RETURN(state, state_of(p_.root, "Metadata"));
    const NodeId tensors = p_.find(state, "state_dict_metadata"),
                 storage = p_.find(state, "storage_data"), paths = p_.find(state, "planner_data");
    if (!p_.is(tensors, Kind::kDict) || !p_.is(storage, Kind::kDict))
      return no("has no tensors or no storage");
    RETURN_IF_ERROR(read_storage(storage));
    RETURN_IF_ERROR(read_entries(tensors));
    RETURN_IF_ERROR(all_used());
    RETURN_IF_ERROR(read_paths(paths));
    RETURN_IF_ERROR(read_key_kinds(p_.find(state, KeyKinds::kEntry)));
    note_writer(state);
    RETURN_IF_ERROR(note_oddities(state));
    return std::move(out_);
  }

 private:
  /// A row of storage_data: the bytes of a chunk, or of a blob.
  struct Stored {
    Shape where;
    FileExtent extent;
    bool blob = false, used = false;
  };

  template <class Names>
  static uint32_t number_of(Names& numbers, std::vector<std::string>& names,
                            std::string_view name) {
    const auto [at, is_new] = numbers.try_emplace(std::string(name), names.size());
    if (is_new) names.emplace_back(name);
    return static_cast<uint32_t>(at->second);
  }

  Status read_storage(NodeId storage) {
    const auto items = p_.items(storage);
    for (size_t i = 0; i + 1 < items.size(); i += 2) {
      ASSIGN_OR_RETURN(index, state_of(items[i], "MetadataIndex"));
      ASSIGN_OR_RETURN(info, state_of(items[i + 1], "_StorageInfo"));
      const NodeId fqn = p_.find(index, "fqn"), offset = p_.find(index, "offset"),
                   path = p_.find(info, "relative_path"), at = p_.find(info, "offset"),
                   length = p_.find(info, "length"),
                   transforms = p_.find(info, "transform_descriptors");
      if (!p_.is(fqn, Kind::kString) || !p_.is(path, Kind::kString) || !p_.is(at, Kind::kInt) ||
          !p_.is(length, Kind::kInt) || p_.integer(at) < 0 || p_.integer(length) < 0)
        return no("has a storage entry without a name, file, offset or length");
      Stored stored;
      stored.extent.file = number_of(file_numbers_, out_.file_names, p_.text(path));
      stored.extent.offset = static_cast<uint64_t>(p_.integer(at));
      stored.extent.length = static_cast<uint64_t>(p_.integer(length));
      std::string described;
      for (const NodeId id : p_.items(transforms)) {
        if (!p_.is(id, Kind::kString)) return no("has a transform that is not text");
        described += (described.empty() ? "" : ", ") + std::string(p_.text(id));
      }
      if (!described.empty())
        stored.extent.transform = 1 + number_of(transform_numbers_, out_.transforms, described);
      stored.blob = offset == kNoNode || p_.is(offset, Kind::kNone);
      if (!stored.blob) {
        ASSIGN_OR_RETURN(where, size(offset));
        stored.where = std::move(where);
      }
      stored_[p_.text(fqn)].push_back(std::move(stored));
    }
    for (auto& [name, chunks] : stored_) {
      const auto before = [](const Stored& a, const Stored& b) {
        return a.blob != b.blob ? a.blob : a.where < b.where;
      };
      std::ranges::sort(chunks, before);
      for (size_t i = 1; i < chunks.size(); ++i) {
        if (!before(chunks[i - 1], chunks[i]))
          return no("has two places for " + printable(name) + shape_text(chunks[i].where));
      }
    }
    return fine();
  }

  /// The row of the chunk at `where`, or of a blob if `where` is null; null if there is none.
  Stored* find_stored(std::string_view name, const Shape* where) {
    const auto entry = stored_.find(name);
    if (entry == stored_.end()) return nullptr;
    auto& chunks = entry->second;
    if (where == nullptr) return chunks.front().blob ? &chunks.front() : nullptr;
    const auto at = std::lower_bound(
        chunks.begin(), chunks.end(), *where,
        [](const Stored& s, const Shape& wanted) { return s.blob || s.where < wanted; });
    return at != chunks.end() && at->where == *where ? &*at : nullptr;
  }

  Status read_entries(NodeId entries) {
    std::unordered_set<std::string_view> seen;
    const auto items = p_.items(entries);
    for (size_t i = 0; i + 1 < items.size(); i += 2) {
      if (!p_.is(items[i], Kind::kString)) return no("has a tensor whose name is not text");
      const std::string name(p_.text(items[i]));
      if (!seen.insert(p_.text(items[i])).second) return no("names " + printable(name) + " twice");
      const GlobalRule* cls = p_.global(items[i + 1]);
      if (cls != nullptr && cls->name == "BytesStorageMetadata") {
        Stored* stored = find_stored(name, nullptr);
        if (stored == nullptr) return no(printable(name) + " is stored nowhere");
        stored->used = true;
        out_.blobs.push_back({name, {}, stored->extent, {}, i / 2});
      } else {
        RETURN_IF_ERROR(read_tensor(name, items[i + 1], i / 2));
      }
    }
    const auto by_name = [](const auto& a, const auto& b) { return a.name < b.name; };
    std::ranges::sort(out_.tensors, by_name);
    std::ranges::sort(out_.blobs, by_name);
    return fine();
  }

  Status read_tensor(const std::string& name, NodeId entry, uint64_t place) {
    ASSIGN_OR_RETURN(state, state_of(entry, "TensorStorageMetadata"));
    Tensor tensor{.name = name, .path = {}, .dtype = nullptr, .shape = {}, .chunks = {}};
    tensor.place = place;
    ASSIGN_OR_RETURN(shape, size(p_.find(state, "size")));
    tensor.shape = std::move(shape);
    RETURN_IF_ERROR(check_size(name, tensor.shape));
    // (dtype, layout, requires_grad, memory format, pinned), and in 2.15 strides
    const NodeId properties = p_.find(state, "properties"), values = p_.item(properties, 2);
    if (!p_.is(properties, Kind::kObject) || p_.global(properties)->name != "TensorProperties")
      return no(printable(name) + " has no properties");
    const bool named = p_.is(values, Kind::kDict);
    const NodeId dtype = named ? p_.find(values, "dtype") : p_.item(values, 0),
                 layout = named ? p_.find(values, "layout") : p_.item(values, 1);
    property_count_ = std::max(property_count_, named ? 0 : p_.items(values).size());
    old_properties_ = old_properties_ || p_.global(properties)->module == kMetadataModule2_2;
    if (!p_.is(dtype, Kind::kGlobal)) return no(printable(name) + " has no dtype");
    tensor.dtype = find_dtype(p_.global(dtype)->name);
    if (tensor.dtype == nullptr) return unread(name, p_.global(dtype)->name, place);
    if (!named && p_.items(values).size() != 5 && p_.items(values).size() != 6)
      return no(printable(name) + " has " + std::to_string(p_.items(values).size()) +
                " properties; torch writes 5 or 6");
    const NodeId format = p_.item(p_.item(named ? kNoNode : p_.item(values, 3), 1), 0);
    if (p_.is(format, Kind::kInt) && (p_.integer(format) < 0 || p_.integer(format) > 2))
      return no(printable(name) + " has an unknown memory format");
    const NodeId layout_name = p_.item(p_.item(layout, 1), 0);
    if (p_.is(layout_name, Kind::kString) && p_.text(layout_name) != "torch.strided")
      return no(printable(name) + " has the layout " + printable(p_.text(layout_name)) +
                "; only dense tensors are read");
    const NodeId chunks = p_.find(state, "chunks");
    if (!p_.is(chunks, Kind::kList)) return no(printable(name) + " has no chunks");
    for (const NodeId id : p_.items(chunks)) {
      ASSIGN_OR_RETURN(chunk, state_of(id, "ChunkStorageMetadata"));
      ASSIGN_OR_RETURN(offset, size(p_.find(chunk, "offsets")));
      ASSIGN_OR_RETURN(sizes, size(p_.find(chunk, "sizes")));
      RETURN_IF_ERROR(check_size(name, sizes));
      Stored* stored = find_stored(name, &offset);
      // An empty box may share its corner with a neighbour; the row is then the neighbour's.
      if (volume(sizes) == 0 && (stored == nullptr || stored->used)) continue;
      if (stored == nullptr)
        return no(printable(name) + ": the chunk at " + shape_text(offset) + " is stored nowhere");
      stored->used = true;
      tensor.chunks.push_back({std::move(offset), std::move(sizes), stored->extent});
    }
    tidy(tensor);
    out_.tensors.push_back(std::move(tensor));
    return fine();
  }

  /// A tensor of a dtype that is not read, such as a quantized one: an item like that of any value
  /// that is not plain data, or several, so that the rest of the directory can be read.
  Status unread(const std::string& name, std::string_view dtype, uint64_t place) {
    const auto known = stored_.find(name);
    if (known == stored_.end()) return no(printable(name) + " is stored nowhere");
    Blob blob{name, {}, known->second[0].extent, {}, place, std::string(dtype)};
    for (Stored& stored : known->second) {
      if (stored.used) return no("has two entries for " + printable(name));
      stored.used = true;
      if (&stored != &known->second[0]) blob.more.push_back(stored.extent);
    }
    out_.blobs.push_back(std::move(blob));
    return fine();
  }

  Status check_size(const std::string& name, const Shape& shape) const {
    if (elements(shape, "").ok()) return fine();
    return elements(shape, what_ + ": " + printable(name)).error();
  }

  /// Sorts the chunks; drops the second of two that are the same, and an empty one at the corner
  /// of one that is not.
  static void tidy(Tensor& t) {
    auto& c = t.chunks;
    std::ranges::stable_sort(c, [](const Chunk& a, const Chunk& b) {
      return a.offset != b.offset ? a.offset < b.offset : volume(a.shape) > volume(b.shape);
    });
    c.erase(std::unique(c.begin(), c.end(),
                        [](const Chunk& a, const Chunk& b) {
                          return a.offset == b.offset &&
                                 (a.shape == b.shape || volume(b.shape) == 0);
                        }),
            c.end());
  }

  Status all_used() const {
    for (const auto& [name, chunks] : stored_) {
      for (const Stored& s : chunks) {
        if (!s.used)
          return no("stores " + printable(name) + (s.blob ? "" : " at " + shape_text(s.where)) +
                    ", which no tensor has");
      }
    }
    return fine();
  }

  /// The path of each leaf in the tree. Without planner data it is the leaf's name.
  Status read_paths(NodeId planner) {
    std::unordered_map<std::string_view, NodeId> paths;
    out_.has_paths = p_.is(planner, Kind::kDict);
    if (!out_.has_paths && planner != kNoNode && !p_.is(planner, Kind::kNone))
      return no("has planner_data, the paths of its leaves, that is not a dict");
    const auto items = p_.items(planner);
    for (size_t i = 0; out_.has_paths && i + 1 < items.size(); i += 2) {
      if (!p_.is(items[i], Kind::kString) || !p_.is(items[i + 1], Kind::kTuple))
        return no("has a path that is not a tuple");
      if (!paths.emplace(p_.text(items[i]), items[i + 1]).second)
        return no("has two paths for " + printable(p_.text(items[i])));
    }
    const auto set = [&](const std::string& name, Path& path) -> Status {
      const auto known = paths.find(name);
      if (known == paths.end()) {
        path = {Key(name)};
        return fine();
      }
      for (const NodeId id : p_.items(known->second)) {
        if (p_.is(id, Kind::kString)) {
          path.emplace_back(std::string(p_.text(id)));
        } else if (p_.is(id, Kind::kInt)) {
          path.emplace_back(Key::Kind::kIndex, p_.integer(id));
        } else {
          return no("has a path of something else than names and numbers");
        }
      }
      if (flat_name(path) != name)
        return no("has the path " + printable(flat_name(path)) + " for " + printable(name));
      return fine();
    };
    for (Tensor& t : out_.tensors) RETURN_IF_ERROR(set(t.name, t.path));
    for (Blob& b : out_.blobs) RETURN_IF_ERROR(set(b.name, b.path));
    return fine();
  }

  /// What only this program's directories say: which keys are numbers.
  Status read_key_kinds(NodeId entry) {
    out_.tells_keys = entry != kNoNode && out_.has_paths;
    if (entry == kNoNode) return fine();
    ASSIGN_OR_RETURN(value, plain_value(p_, entry, what_, uint64_t{1} << 22));
    ASSIGN_OR_RETURN(kinds, KeyKinds::of(value, what_));
    for (Tensor& t : out_.tensors) kinds.restore(t.path);
    for (Blob& b : out_.blobs) kinds.restore(b.path);
    return fine();
  }

  /// Refuses what torch neither writes nor reads.
  Status note_oddities(NodeId state) {
    const auto items = p_.items(state);
    for (size_t i = 0; i + 1 < items.size(); i += 2) {
      static constexpr std::string_view kKnown[] = {
          "state_dict_metadata", "planner_data", "storage_data",
          "storage_meta",        "version",      KeyKinds::kEntry};
      const bool text = p_.is(items[i], Kind::kString);
      if (text && (p_.text(items[i]) == "all_local_plans" || p_.text(items[i]) == "mcore_data")) {
        if (p_.text(items[i]) == "mcore_data") out_.facts.push_back("written by Megatron-Core");
        continue;  // how it was saved, which the chunks say too
      }
      if (!text || std::ranges::find(kKnown, p_.text(items[i])) == std::end(kKnown)) {
        ASSIGN_OR_RETURN(value, plain_value(p_, items[i + 1], what_ + ": an unknown entry"));
        static_cast<void>(value);
        out_.warnings.push_back("the metadata has an unknown entry " +
                                (text ? printable(p_.text(items[i])) : "without a name"));
      }
    }
    const NodeId version = p_.find(state, "version");
    if (p_.is(version, Kind::kString) && p_.text(version) != "1.0.0")
      out_.warnings.push_back("metadata of another version: " + printable(p_.text(version)));
    return fine();
  }

  /// The version of torch that writes this layout of the metadata.
  void note_writer(NodeId state) {
    const NodeId meta = p_.find(state, "storage_meta"), version = p_.find(state, "version");
    const NodeId fields = p_.item(meta, 2);
    const bool has_meta = p_.is(meta, Kind::kObject);
    out_.of_tool = has_meta && p_.is(p_.find(fields, "save_id"), Kind::kNone);  // torch's has one
    const char* torch = property_count_ >= 6                    ? "2.15 or later"
                        : old_properties_                       ? "2.2 or older"
                        : !has_meta                             ? "2.3"
                        : p_.find(fields, "modules") == kNoNode ? "2.4 to 2.6"
                                                                : "2.7 to 2.14";
    out_.facts.push_back("laid out as torch " + std::string(torch) + " does");
    if (p_.is(version, Kind::kString))
      out_.facts.push_back("metadata version " + printable(p_.text(version)));
    out_.facts.push_back("pickle protocol " + std::to_string(p_.protocol));
    if (!out_.has_paths) out_.facts.push_back("no paths: names are all that is known of nesting");
    for (const std::string& t : out_.transforms)
      out_.facts.push_back("items stored as " + printable(t));
  }

  Manifest out_;
  std::unordered_map<std::string_view, std::vector<Stored>> stored_;
  std::unordered_map<std::string, size_t> file_numbers_, transform_numbers_;
  size_t property_count_ = 0;
  bool old_properties_ = false;
};

}  // namespace

Result<Manifest> parse_metadata(std::string bytes, const std::string& what) {
  // A chunk takes 28 values in 142 bytes, and 405 B parameters on 512 ranks have 2.7 million.
  PickleLimits limits;
  limits.bytes_per_node = 4;
  ASSIGN_OR_RETURN(pickle, read_pickle(std::move(bytes), metadata_globals(), what, limits));
  return Parser(pickle, what).parse();
}

}  // namespace lowbit::ckpt
