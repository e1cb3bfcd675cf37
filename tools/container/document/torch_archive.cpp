#include "container/document/torch_archive.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "container/document/tree.h"
#include "container/manifest/record_reader.h"
#include "container/pickled/globals.h"
#include "container/pickled/tensor_node.h"
#include "io/text.h"
#include "pickle/writer.h"

namespace lowbit::ckpt {
namespace {

/// Python's pickler on torch's objects, opcode by opcode.
class Pickler {
 public:
  Pickler(const Document& document, const std::vector<TreeNode>& tree)
      : shares_(document.manifest != nullptr &&
                (document.manifest->kind == ContainerKind::kTorch ||
                 document.manifest->kind == ContainerKind::kLegacy)),
        tree_(tree) {
    if (!shares_) return;
    std::unordered_set<const Tensor*> kept;
    for (const Leaf& leaf : document.leaves) kept.insert(leaf.stored);
    std::unordered_set<std::string> views;
    for (const Tensor* tensor : kept) {
      if (tensor != nullptr && tensor->alias) views.insert(view_key(*tensor));
    }
    for (const Tensor& tensor : document.manifest->tensors) {
      if (tensor.alias && !kept.contains(&tensor) && !views.contains(view_key(tensor)))
        split_storages_.insert(tensor.alias->storage);
    }
  }

  TorchArchive run() {
    node(0);
    out_.pickle = w_.finish();
    return std::move(out_);
  }

 private:
  void node(size_t number) {
    const TreeNode& n = tree_[number];
    const size_t count = n.children.size();
    switch (n.kind) {
      case TreeNode::Kind::kLeaf:
        return leaf(*n.leaf, n.info);
      case TreeNode::Kind::kList:
        w_.empty_list().put();
        return write_items(w_, count, [&](size_t i) { node(n.children[i].second); });
      case TreeNode::Kind::kTuple:
        if (count > 3) w_.mark();
        for (const auto& [key, child] : n.children) node(child);
        w_.tuple(count).put();
        return;
      case TreeNode::Kind::kDict:
        break;
    }
    const bool ordered = n.info != nullptr && n.info->ordered;
    if (ordered) {
      ordered_dict();
    } else {
      w_.empty_dict().put();
    }
    write_entries(w_, count, ordered, [&](size_t i) {
      const Key& key = n.children[i].first;
      if (key.is_name()) {
        w_.text(key.name);
      } else {
        w_.integer(key.number);
      }
      node(n.children[i].second);
    });
    if (ordered) attributes(*n.info);
  }

  void leaf(const Leaf& l, const DictInfo* info) {
    switch (l.kind) {
      case Leaf::Kind::kTensor:
        ++out_.tensors;
        return tensor(l);
      case Leaf::Kind::kSubclass:
        ++out_.tensors;
        return subclass(l);
      default:
        ++out_.values;
        write_value(w_, l.value);
        if (info != nullptr && l.value.is(Value::Kind::kOrdered)) attributes(*info);
    }
  }

  void attributes(const DictInfo& info) {
    if (!info.attributes.is_dict()) return;
    write_value(w_, info.attributes);
    w_.build();
  }
  void ordered_dict() { w_.global("collections", "OrderedDict").tuple(0).call().put(); }
  void sizes(const Shape& s) {
    w_.integers(s);
    if (!s.empty()) w_.put();
  }

  void tensor(const Leaf& l) {
    dense(l, alias_of(l), l.stored != nullptr ? l.stored->gradient : Gradient{});
  }

  /// How the leaf shares the storage that it has in the source; null where it gets one of its own.
  const Alias* alias_of(const Leaf& l) const {
    if (!shares_ || l.stored == nullptr || !l.stored->alias) return nullptr;
    return split_storages_.contains(l.stored->alias->storage) ? nullptr : &*l.stored->alias;
  }

  /// The same for tensors of the same elements of a storage.
  static std::string view_key(const Tensor& tensor) {
    const Alias& alias = *tensor.alias;
    return alias.storage + " " + std::to_string(alias.first) + " " + shape_text(alias.stride) +
           " " + shape_text(tensor.shape) + " " + tensor.dtype->name;
  }

  /// The number of the leaf's storage: one that was written for another leaf where they share it.
  size_t storage(const Leaf& l, const Alias* alias) {
    const uint64_t width = static_cast<uint64_t>(l.dtype->bytes);
    const bool viewed = shares_ && l.stored != nullptr && l.stored->alias;
    const std::string tied = !l.tied.empty() ? l.tied : viewed ? view_key(*l.stored) : "";
    if (alias == nullptr) {
      const size_t next = out_.storages.size();
      const size_t number = tied.empty() ? next : tied_.try_emplace(tied, next).first->second;
      if (number == next) out_.storages.push_back({&l, false, l.bytes()});
      return number;
    }
    const auto [known, is_new] = shared_.try_emplace(alias->storage, out_.storages.size());
    if (is_new) out_.storages.push_back({&l, true, alias->elements * width});
    return known->second;
  }

  void dense(const Leaf& l, const Alias* alias, const Gradient& gradient) {
    const size_t number = storage(l, alias);
    write_tensor(w_, {*l.dtype, std::to_string(number), out_.storages[number].bytes,
                      alias == nullptr ? 0 : alias->first, l.shape,
                      alias == nullptr ? row_major(l.shape) : alias->stride, gradient});
  }

  void subclass(const Leaf& l) {
    const size_t dot = l.cls.find_last_of('.');
    const std::string module = l.cls.substr(0, dot), name = l.cls.substr(dot + 1);
    w_.global("torch._tensor", "_rebuild_from_type_v2").mark();
    w_.global("torch._utils", "_rebuild_wrapper_subclass").global(module, name).mark();
    w_.global(module, name).global("torch", l.dtype->name);
    sizes(l.shape);
    sizes(row_major(l.shape));
    w_.integer(0);
    if (layout_) {  // there is one object for it in Python
      w_.get(*layout_);
    } else {
      w_.global("torch.serialization", "_get_layout").text("torch.strided").tuple(1).put().call();
      layout_ = w_.next();
      w_.put();
    }
    write_value(w_, Value{.kind = Value::Kind::kDevice, .text = "cpu"});
    w_.boolean(false).tuple(8).put();
    w_.empty_dict().put();
    const auto& extra = l.attributes.items;
    write_entries(w_, l.parts.size() + extra.size() / 2, false, [&](size_t i) {
      if (i < l.parts.size()) {
        w_.text(l.parts[i].path[0].name);
        dense(l.parts[i], nullptr, {});
      } else {
        write_value(w_, extra[2 * (i - l.parts.size())]);
        write_value(w_, extra[2 * (i - l.parts.size()) + 1]);
      }
    });
    w_.tuple(4).put().call().put();
  }

  bool shares_;
  const std::vector<TreeNode>& tree_;
  PickleWriter w_{2};
  TorchArchive out_;
  std::unordered_map<std::string, size_t> shared_, tied_;  // numbers of storages
  // Storages of the source with a tensor that is not written, nor another of the same elements: its
  // values must not stay in them.
  std::unordered_set<std::string> split_storages_;
  std::optional<uint64_t> layout_;
};

/// Calls `use` with the bytes of a whole storage of the source.
Status for_record(const Manifest& manifest, const Leaf& leaf, uint64_t piece,
                  const std::function<Status(const char*, uint64_t)>& use) {
  ASSIGN_OR_RETURN(stored, manifest.container->stored(*leaf.stored, leaf.stored->chunks[0]));
  return manifest.container->reader().read_all(stored.parts[0].second.record, piece,
                                               printable(leaf.name()), use);
}

/// Writes all records; `fill` writes the bytes of a storage.
template <class Fill>
Status write_records(ZipWriter& zip, const TorchArchive& archive, const Fill& fill) {
  RETURN_IF_ERROR(zip.record("data.pkl", archive.pickle));
  RETURN_IF_ERROR(zip.record(".format_version", "1"));
  RETURN_IF_ERROR(zip.record(".storage_alignment", "64"));
  RETURN_IF_ERROR(zip.record("byteorder", "little"));
  for (size_t i = 0; i < archive.storages.size(); ++i) {
    RETURN_IF_ERROR(zip.begin("data/" + std::to_string(i), archive.storages[i].bytes));
    RETURN_IF_ERROR(fill(archive.storages[i]));
    RETURN_IF_ERROR(zip.end());
  }
  return fine();
}

/// How deep values lie below one.
size_t depth_below(const Value& value) {
  size_t deepest = 0;
  for (const Value& item : value.items) deepest = std::max(deepest, 1 + depth_below(item));
  return deepest;
}

/// An error where the reader of such a file would refuse it: its tree has too many values, each of
/// whose places counts for four, or is too deep.
Status check_limits(const std::vector<TreeNode>& tree) {
  uint64_t values = 4 * tree.size();
  for (const TreeNode& node : tree) {
    if (node.info != nullptr && node.info->attributes.is_dict())
      values += node.info->attributes.count();
    if (node.leaf == nullptr) continue;
    const bool plain = node.leaf->kind == Leaf::Kind::kValue;
    if (plain) values += node.leaf->value.count();
    const size_t below = plain ? depth_below(node.leaf->value) : 0;
    if (node.leaf->path.size() + below > Value::kMaxDepth)
      return too_large(printable(node.leaf->name()) + ": would be nested more than " +
                       std::to_string(Value::kMaxDepth) +
                       " deep, which no reader takes; a directory keeps it, and --exclude leaves "
                       "it out");
  }
  if (values > kMaxPlainValues)
    return too_large("the file would have " + std::to_string(values) +
                     " values beside its tensors, more than the limit of " +
                     std::to_string(kMaxPlainValues) +
                     "; save long lists of numbers as tensors, or write a directory");
  return fine();
}

}  // namespace

Result<TorchArchive> torch_archive(const Document& document) {
  for (const Leaf& leaf : document.leaves) {
    const std::string name = printable(leaf.name());
    if (leaf.kind == Leaf::Kind::kOpaque) return unwritable(leaf);
    if (leaf.kind == Leaf::Kind::kTensor && leaf.source == nullptr)
      return bad(name + ": is a tensor subclass in parts, which --to torchao joins");
    if (leaf.kind == Leaf::Kind::kSubclass && !is_known_subclass(leaf.cls))
      return bad(name + ": is a " + printable(leaf.cls) + ", which is not written");
  }
  ASSIGN_OR_RETURN(tree, tree_of(document));
  RETURN_IF_ERROR(check_limits(tree));
  return Pickler(document, tree).run();
}

std::string archive_folder(const std::string& path) {
  std::string name = path.substr(path.find_last_of('/') + 1);
  name = name.substr(0, name.find_last_of('.'));
  return name.empty() || !is_utf8(name, false) ? "archive" : name;
}

Result<uint64_t> archive_length(const TorchArchive& archive) {
  Output counter;
  ZipWriter zip(counter);
  RETURN_IF_ERROR(
      write_records(zip, archive, [&](const TorchStorage& s) { return zip.skip(s.bytes); }));
  RETURN_IF_ERROR(zip.close());
  return counter.position();
}

Status write_archive(ZipWriter& zip, const TorchArchive& archive, const Document& document,
                     uint64_t piece, const std::function<Status(uint64_t)>& wrote) {
  uint64_t done = 0;
  const auto put = [&](const char* data, uint64_t bytes) -> Status {
    RETURN_IF_ERROR(zip.data(data, bytes));
    done += bytes;
    return wrote(done);
  };
  return write_records(zip, archive, [&](const TorchStorage& s) {
    if (s.whole) return for_record(*document.manifest, *s.leaf, piece, put);
    const auto width = static_cast<uint64_t>(s.leaf->dtype->bytes);
    return for_elements(
        *s.leaf, 0, volume(s.leaf->shape), piece,
        [&](const char* data, uint64_t, uint64_t count) { return put(data, count * width); });
  });
}

}  // namespace lowbit::ckpt
