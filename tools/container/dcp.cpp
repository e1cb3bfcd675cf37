#include "container/dcp.h"

#include <algorithm>
#include <set>

#include "pickle/reader.h"
#include "pickle/writer.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kMostMetadata = 1ull << 30;
constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";

bool metadata_global(std::string_view module, std::string_view name) {
  const auto one_of = [name](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (module == kModule) {
    return one_of({"Metadata", "TensorStorageMetadata", "BytesStorageMetadata",
                   "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
                   "MetadataIndex", "StorageMeta"});
  }
  if (module == "torch.distributed._shard.sharded_tensor.metadata")
    return one_of({"TensorProperties", "MEM_FORMAT_ENCODING"});
  if (module == "torch.distributed.checkpoint.filesystem") return name == "_StorageInfo";
  if (module == "torch.serialization") return name == "_get_layout";
  if (module == "pathlib" || module == "pathlib._local")
    return one_of({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"});
  if (module == "builtins" || module == "__builtin__")
    return name == "getattr";  // only ever data here: an enum's name, of early Python 3.11
  return module == "torch" && (name == "Size" || find_dtype(std::string(name)) != nullptr);
}

class Parser {
 public:
  Parser(const Pickle& p, const std::string& what) : p_(p), what_(what) {}

  Result<Manifest> parse() {
    const Node& root = p_[p_.root];
    LB_TRY(state, state_of(root, "Metadata"));
    const Node* tensors = p_.find(*state, "state_dict_metadata");
    const Node* storage = p_.find(*state, "storage_data");
    if (tensors == nullptr || storage == nullptr || tensors->kind != Kind::kDict ||
        storage->kind != Kind::kDict)
      return no("has no tensors or no storage");
    LB_CHECK(read_storage(*storage));
    LB_CHECK(read_tensors(*tensors));
    if (!places_.empty())
      return no("stores " + printable(places_.begin()->first.first) +
                shape_text(places_.begin()->first.second) + ", which no tensor has");
    LB_CHECK(read_paths(p_.find(*state, "planner_data")));
    if (const Node* version = p_.find(*state, "version");
        version != nullptr && version->kind == Kind::kString)
      out_.facts.push_back("version " + printable(version->text));
    return std::move(out_);
  }

 private:
  using Key = std::pair<std::string, Shape>;

  Error no(const std::string& why) const { return bad(what_ + ": " + why); }

  Result<const Node*> state_of(const Node& object, std::string_view cls) const {
    const Node& c = p_.item(object, 0);
    if (object.kind != Kind::kObject || !c.text.ends_with(" " + std::string(cls)) ||
        object.items.size() < 3)
      return no("expected a " + std::string(cls));
    return &p_.item(object, 2);
  }

  /// torch.Size((1, 2)), or a plain tuple or list.
  Result<Shape> size(const Node* node) const {
    const Node* items = node;
    if (node != nullptr && node->kind == Kind::kCall) items = &p_.item(p_.item(*node, 1), 0);
    if (items == nullptr || (items->kind != Kind::kTuple && items->kind != Kind::kList))
      return no("expected a size");
    Shape out;
    for (const NodeId id : items->items) {
      if (p_[id].kind != Kind::kInt || p_[id].integer < 0)
        return no("has a size that is not a natural number");
      out.push_back(p_[id].integer);
    }
    if (out.size() > 64) return no("has a size of more than 64 dimensions");
    return out;
  }

  Status read_storage(const Node& storage) {
    for (size_t i = 0; i + 1 < storage.items.size(); i += 2) {
      LB_TRY(index, state_of(p_[storage.items[i]], "MetadataIndex"));
      LB_TRY(info, state_of(p_[storage.items[i + 1]], "_StorageInfo"));
      const Node *fqn = p_.find(*index, "fqn"), *offset = p_.find(*index, "offset");
      const Node *path = p_.find(*info, "relative_path"), *at = p_.find(*info, "offset"),
                 *length = p_.find(*info, "length");
      if (fqn == nullptr || fqn->kind != Kind::kString || path == nullptr ||
          path->kind != Kind::kString || at == nullptr || at->kind != Kind::kInt ||
          length == nullptr || length->kind != Kind::kInt || at->integer < 0 ||
          length->integer < 0) {
        return no("has a storage entry without a name, file, offset or length");
      }
      const Node* transforms = p_.find(*info, "transform_descriptors");
      if (transforms != nullptr && transforms->kind == Kind::kList && !transforms->items.empty()) {
        return no("item " + printable(fqn->text) + " is stored as " +
                  printable(p_.item(*transforms, 0).text) + ", which this version does not read");
      }
      Shape where;
      if (offset != nullptr && offset->kind != Kind::kNone) {
        LB_TRY(sizes, size(offset));
        where = std::move(sizes);
      } else {
        where = {-1};  // a blob
      }
      const Place place{path->text, static_cast<uint64_t>(at->integer),
                        static_cast<uint64_t>(length->integer)};
      if (!places_.emplace(Key{fqn->text, where}, place).second)
        return no("has two places for " + printable(fqn->text) + shape_text(where));
    }
    return fine();
  }

  Status read_tensors(const Node& entries) {
    std::set<std::string> seen;
    for (size_t i = 0; i + 1 < entries.items.size(); i += 2) {
      const Node &key = p_[entries.items[i]], &entry = p_[entries.items[i + 1]];
      if (key.kind != Kind::kString) return no("has a tensor whose name is not text");
      const std::string& name = key.text;
      if (!seen.insert(name).second) return no("names " + printable(name) + " twice");
      const std::string cls = p_.item(entry, 0).text;
      if (entry.kind == Kind::kObject && cls.ends_with(" BytesStorageMetadata")) {
        LB_TRY(place, take(name, {-1}));
        out_.blobs.push_back({name, std::move(place)});
        continue;
      }
      LB_TRY(state, state_of(entry, "TensorStorageMetadata"));
      Tensor tensor{.name = name, .dtype = nullptr, .shape = {}, .chunks = {}};
      LB_TRY(shape, size(p_.find(*state, "size")));
      tensor.shape = std::move(shape);
      LB_CHECK(elements(tensor.shape, what_ + ": " + printable(name)).ok()
                   ? fine()
                   : Status(no(printable(name) + " has an impossible size")));
      const Node* properties = p_.find(*state, "properties");
      if (properties != nullptr && properties->items.size() > 2) {
        const Node& values =
            p_.item(*properties, 2);  // (dtype, layout, requires_grad, memory format, pinned[,
                                      // strides of 2.15]), or a dict
        const Node* dtype =
            values.kind == Kind::kDict ? p_.find(values, "dtype") : &p_.item(values, 0);
        if (dtype != nullptr && dtype->text.starts_with("torch "))
          tensor.dtype = find_dtype(dtype->text.substr(6));
      }
      if (tensor.dtype == nullptr) return no(printable(name) + " has an unknown dtype");
      const Node* chunks = p_.find(*state, "chunks");
      if (chunks == nullptr || chunks->kind != Kind::kList)
        return no(printable(name) + " has no chunks");
      for (const NodeId id : chunks->items) {
        LB_TRY(chunk, state_of(p_[id], "ChunkStorageMetadata"));
        LB_TRY(offset, size(p_.find(*chunk, "offsets")));
        LB_TRY(sizes, size(p_.find(*chunk, "sizes")));
        if (std::any_of(tensor.chunks.begin(), tensor.chunks.end(),
                        [&](const Chunk& c) { return c.offset == offset && c.shape == sizes; }))
          continue;
        auto place = places_.find(Key{name, offset});
        LB_TRY(count, elements(sizes, what_));
        if (place == places_.end() && count == 0)
          continue;  // an empty box that shares its corner with a neighbour
        if (place == places_.end())
          return no(printable(name) + ": the chunk at " + shape_text(offset) +
                    " is stored nowhere");
        tensor.chunks.push_back({std::move(offset), std::move(sizes), place->second});
        used_.insert(place->first);
      }
      out_.tensors.push_back(std::move(tensor));
    }
    for (const Key& key : used_) places_.erase(key);
    const auto by_name = [](const auto& a, const auto& b) { return a.name < b.name; };
    std::sort(out_.tensors.begin(), out_.tensors.end(), by_name);
    std::sort(out_.blobs.begin(), out_.blobs.end(), by_name);
    return fine();
  }

  Result<Place> take(const std::string& name, const Shape& where) {
    const auto found = places_.find(Key{name, where});
    if (found == places_.end()) return no(printable(name) + " is stored nowhere");
    Place place = found->second;
    places_.erase(found);
    return place;
  }

  Status read_paths(const Node* planner) {
    if (planner == nullptr || planner->kind != Kind::kDict) return fine();
    out_.has_paths = true;
    for (size_t i = 0; i + 1 < planner->items.size(); i += 2) {
      const Node &key = p_[planner->items[i]], &value = p_[planner->items[i + 1]];
      if (key.kind != Kind::kString || value.kind != Kind::kTuple)
        return no("has a path that is not a tuple");
      Path path;
      for (const NodeId id : value.items) {
        if (p_[id].kind == Kind::kString) {
          path.emplace_back(p_[id].text);
        } else if (p_[id].kind == Kind::kInt) {
          path.emplace_back(p_[id].integer);
        } else {
          return no("has a path of something else than names and numbers");
        }
      }
      out_.paths[key.text] = std::move(path);
    }
    return fine();
  }

  const Pickle& p_;
  const std::string& what_;
  Manifest out_;
  std::map<Key, Place> places_;
  std::set<Key> used_;
};

/// The parts that ranks wrote each for itself, as one: chunk lists are joined.
Status join(Manifest& all, Manifest part, const std::string& what) {
  for (Tensor& tensor : part.tensors) {
    auto same = std::find_if(all.tensors.begin(), all.tensors.end(),
                             [&](const Tensor& t) { return t.name == tensor.name; });
    if (same == all.tensors.end()) {
      all.tensors.push_back(std::move(tensor));
      continue;
    }
    if (same->dtype != tensor.dtype || same->shape != tensor.shape)
      return bad(what + ": " + printable(tensor.name) +
                 " has another shape or dtype than on other ranks");
    for (Chunk& chunk : tensor.chunks) {
      if (std::none_of(same->chunks.begin(), same->chunks.end(), [&](const Chunk& c) {
            return c.offset == chunk.offset && c.shape == chunk.shape;
          })) {
        same->chunks.push_back(std::move(chunk));
      }
    }
  }
  for (Blob& blob : part.blobs) {
    if (std::none_of(all.blobs.begin(), all.blobs.end(),
                     [&](const Blob& b) { return b.name == blob.name; }))
      all.blobs.push_back(std::move(blob));
  }
  all.has_paths = all.has_paths || part.has_paths;
  all.paths.merge(part.paths);
  return fine();
}

Status check_boxes(const Tensor& t) {
  LB_TRY(total, elements(t.shape, printable(t.name)));
  uint64_t covered = 0;
  std::vector<const Chunk*> order;
  for (const Chunk& c : t.chunks) {
    if (c.offset.size() != t.shape.size() || c.shape.size() != t.shape.size())
      return bad(printable(t.name) + ": a chunk has another number of dimensions");
    for (size_t d = 0; d < t.shape.size(); ++d) {
      if (c.offset[d] > t.shape[d] || c.shape[d] > t.shape[d] - c.offset[d]) {
        return bad(printable(t.name) + ": the chunk " + shape_text(c.shape) + " at " +
                   shape_text(c.offset) + " reaches out of " + shape_text(t.shape));
      }
    }
    LB_TRY(count, elements(c.shape, printable(t.name)));
    covered += count;
    if (count > 0) order.push_back(&c);
  }
  std::sort(order.begin(), order.end(),
            [](const Chunk* a, const Chunk* b) { return a->offset < b->offset; });
  for (size_t i = 0; i < order.size(); ++i) {
    for (size_t k = i + 1; k < order.size(); ++k) {
      if (!t.shape.empty() && order[k]->offset[0] >= order[i]->offset[0] + order[i]->shape[0])
        break;  // sorted: none after overlaps
      bool apart = false;
      for (size_t d = 0; d < t.shape.size(); ++d) {
        apart = apart || order[k]->offset[d] >= order[i]->offset[d] + order[i]->shape[d] ||
                order[i]->offset[d] >= order[k]->offset[d] + order[k]->shape[d];
      }
      if (!apart)
        return bad(printable(t.name) + ": its chunks at " + shape_text(order[i]->offset) + " and " +
                   shape_text(order[k]->offset) + " overlap");
    }
  }
  if (covered != total) {
    return bad(printable(t.name) + ": its chunks have " + std::to_string(covered) + " of its " +
               std::to_string(total) + " elements; a part is missing");
  }
  return fine();
}

/// Opens every file that is named; items must lie inside it and not overlap.
Status check_items(Manifest& m) {
  std::map<std::string, std::vector<std::pair<const Place*, const std::string*>>> items;
  for (const Tensor& t : m.tensors) {
    for (const Chunk& c : t.chunks) items[c.place.file].emplace_back(&c.place, &t.name);
  }
  for (const Blob& b : m.blobs) items[b.place.file].emplace_back(&b.place, &b.name);
  for (auto& [name, places] : items) {
    LB_TRY(file, m.folder->file(name));
    std::sort(places.begin(), places.end(),
              [](const auto& a, const auto& b) { return a.first->offset < b.first->offset; });
    uint64_t end = 0;
    const Place* before = nullptr;
    for (const auto& [place, owner] : places) {
      if (place->offset > file->size() || place->length > file->size() - place->offset) {
        return bad(file->name() + ": the item of " + printable(*owner) + " is bytes " +
                   std::to_string(place->offset) + ".." +
                   std::to_string(place->offset + place->length) + " of a file of " +
                   std::to_string(file->size()) + "; the file is cut off");
      }
      if (before != nullptr && place->offset < end)
        return bad(file->name() + ": the item of " + printable(*owner) + " overlaps another");
      end = place->offset + place->length;
      before = place;
    }
    m.files[name] = std::move(file);
  }
  return fine();
}

bool is_rank_metadata(const std::string& name) {
  return name.starts_with("__") && name.ends_with(".metadata") && name.size() > 11 &&
         std::all_of(name.begin() + 2, name.end() - 9, [](char c) { return c >= '0' && c <= '9'; });
}

}  // namespace

Result<Manifest> parse_metadata(const std::string& bytes, const std::string& what) {
  LB_TRY(pickle, read_pickle(bytes, metadata_global, what));
  return Parser(pickle, what).parse();
}

Status check_coverage(const Manifest& manifest) {
  for (const Tensor& t : manifest.tensors) LB_CHECK(check_boxes(t));
  return fine();
}

Result<Manifest> read_dcp(const std::string& path) {
  LB_TRY(folder, Directory::open(path));
  Manifest all;
  if (folder->has(".metadata")) {
    LB_TRY(bytes, folder->content(".metadata", kMostMetadata));
    LB_TRY(manifest, parse_metadata(bytes, path + "/.metadata"));
    all = std::move(manifest);
  } else {
    LB_TRY(names, folder->list());
    int ranks = 0;
    for (const std::string& name : names) {
      if (!is_rank_metadata(name)) continue;
      if (name != "__" + std::to_string(ranks) + ".metadata" &&
          !folder->has("__" + std::to_string(ranks) + ".metadata")) {
        return bad(path + ": has " + name + " but not __" + std::to_string(ranks) +
                   ".metadata; a rank's part is missing");
      }
      LB_TRY(bytes, folder->content(name, kMostMetadata));
      LB_TRY(part, parse_metadata(bytes, path + "/" + name));
      LB_CHECK(join(all, std::move(part), path + "/" + name));
      ++ranks;
    }
    if (ranks == 0) {
      const bool torn = std::any_of(names.begin(), names.end(),
                                    [](const std::string& n) { return n.ends_with(".distcp"); });
      return bad(path +
                 (torn ? ": has no .metadata, which is written last: the save did not finish"
                       : ": is not a checkpoint of torch.distributed.checkpoint (no .metadata)"));
    }
    all.facts.push_back("metadata of " + std::to_string(ranks) + " ranks, each its own");
  }
  all.folder = folder;
  LB_CHECK(check_coverage(all));
  LB_CHECK(check_items(all));
  return all;
}

std::string metadata_bytes(const Manifest& m, const std::string& path) {
  using namespace emit;
  const auto torch_size = [](const Shape& s) {
    return call(global("torch", "Size"), tuple({integers(s)}));
  };
  const auto field = [](std::string_view name, const std::string& value) {
    return text(name) + value;
  };
  const std::string layout =
      call(global("torch.serialization", "_get_layout"), tuple({text("torch.strided")}));
  const std::string format = call(global(kModule, "_MEM_FORMAT_ENCODING"), tuple({integer(0)}));
  const auto info = [&](const Place& p) {
    return object(global("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
                  dict(field("relative_path", text(p.file)) +
                       field("offset", integer(static_cast<int64_t>(p.offset))) +
                       field("length", integer(static_cast<int64_t>(p.length)))));
  };
  std::string tensors, storage, paths;
  for (const Tensor& t : m.tensors) {
    std::string chunks;
    int64_t number = 0;
    for (const Chunk& c : t.chunks) {
      chunks += object(
          global(kModule, "ChunkStorageMetadata"),
          dict(field("offsets", torch_size(c.offset)) + field("sizes", torch_size(c.shape))));
      storage += object(global(kModule, "MetadataIndex"),
                        dict(field("fqn", text(t.name)) + field("index", integer(number++)) +
                             field("offset", torch_size(c.offset)))) +
                 info(c.place);
    }
    const std::string properties = object(
        global(kModule, "TensorProperties"),
        tuple({global("torch", t.dtype->name), layout, boolean(false), format, boolean(false)}));
    tensors += text(t.name) +
               object(global(kModule, "TensorStorageMetadata"),
                      dict(field("properties", properties) + field("size", torch_size(t.shape)) +
                           field("chunks", list(chunks))));
  }
  for (const Blob& b : m.blobs) {
    tensors += text(b.name) + global(kModule, "BytesStorageMetadata") + ")\x81";
    storage += object(global(kModule, "MetadataIndex"),
                      dict(field("fqn", text(b.name)) + field("index", none()))) +
               info(b.place);
  }
  for (const auto& [name, way] : m.paths) {
    std::vector<std::string> items;
    for (const auto& step : way)
      items.push_back(std::holds_alternative<std::string>(step) ? text(std::get<0>(step))
                                                                : integer(std::get<1>(step)));
    paths += text(name) + tuple(items);
  }
  const std::string meta =
      object(global(kModule, "StorageMeta"),
             dict(field("checkpoint_id", text(path)) + field("save_id", none()) +
                  field("load_id", none()) + field("modules", list(""))));
  return "\x80\x04" +
         object(global(kModule, "Metadata"),
                dict(field("state_dict_metadata", dict(tensors)) +
                     field("planner_data", m.has_paths ? dict(paths) : none()) +
                     field("storage_data", dict(storage)) + field("storage_meta", meta) +
                     field("version", text("1.0.0")))) +
         ".";
}

}  // namespace lowbit::ckpt
