#include "container/dcp/value_archive.h"

#include <algorithm>
#include <map>

#include "container/pickled/globals.h"
#include "container/pickled/item.h"
#include "container/pickled/tensor_node.h"
#include "container/zip/zip.h"
#include "io/read/buffered_file.h"
#include "io/text.h"
#include "pickle/numpy_value.h"
#include "pickle/plain.h"
#include "pickle/reader.h"
#include "pickle/writer.h"

namespace lowbit::ckpt {
namespace {

const Allowlist& value_globals() {
  static const std::vector<GlobalRule> rules = [] {
    std::vector<GlobalRule> r = plain_globals();
    r.insert(r.end(), {{"torch._utils", "_rebuild_tensor_v2", "pizzbh?w"},
                       {"torch._utils", "_rebuild_tensor_v3", "pizzbhg?w"},
                       {"torch._utils", "_rebuild_parameter", "tbh"},
                       {"torch._utils", "_rebuild_sparse_tensor", "x*"},  // refused by their names
                       {"torch._utils", "_rebuild_qtensor", "x*"},
                       {"torch.storage", "UntypedStorage", nullptr},
                       {"numpy", "dtype", "s?xx", true},
                       {"numpy", "ndarray", nullptr},
                       {"_io", "BytesIO", nullptr, true}});
    for (const char* kind : {"QUInt8Storage", "QInt8Storage", "QInt32Storage", "QUInt4x2Storage",
                             "QUInt2x4Storage", "per_tensor_affine", "per_channel_affine"})
      r.push_back({"torch", kind, nullptr});
    for (const char* module : {"numpy.core.multiarray", "numpy._core.multiarray"}) {
      r.push_back({module, "scalar", "xx"});  // its bytes, which bytes_of() takes in every form
      r.push_back({module, "_reconstruct", "gny", true});
    }
    for (const Dtype& d : all_dtypes()) {
      if (d.storage[0] != '\0') r.push_back({"torch", d.storage, nullptr});
    }
    return r;
  }();
  static const Allowlist allowed{rules, true};
  return allowed;
}

/// The storages of an archive, by the keys of its records.
class ArchiveStorages : public Storages {
 public:
  explicit ArchiveStorages(const ZipIndex& index) : index_(index) {}
  Result<Record> find(const StorageName& name, const std::string& what) override {
    const ZipRecord* r = index_.find("data/" + name.key);
    if (r == nullptr) return bad(what + ": its record data/" + printable(name.key) + " is missing");
    const auto [known, is_new] = dtypes_.emplace(name.key, name.dtype);
    if (!is_new && known->second != name.dtype)
      return bad(what + ": its storage " + printable(name.key) + " has two types");
    return Record{r->name, 0, r->offset, r->size, r->crc, index_.has_crcs};
  }

 private:
  const ZipIndex& index_;
  std::map<std::string, const Dtype*> dtypes_;
};

/// Serializes a value as a new pickle, node by node.
class ValueWriter {
 public:
  ValueWriter(const Pickle& p, const ZipIndex& index, const std::string& what)
      : p_(p), storages_(index), what_(what), w_(2), budget_(PickleBudget::of(p)) {}

  Result<std::string> pickle() {
    RETURN_IF_ERROR(value(p_.root, 0));
    return w_.finish();
  }
  /// Keys of the storages that it names, by their new numbers.
  const std::vector<std::string>& keys() const { return keys_; }

 private:
  Status value(NodeId id, int depth) {
    if (depth > Value::kMaxDepth)
      return bad(what_ + ": is nested more than " + std::to_string(Value::kMaxDepth) + " deep");
    if (left_-- == 0) return too_large(what_ + ": unfolds to too many values");
    if (is_tensor(p_, id)) return tensor(id);
    const GlobalRule* rule = p_.global(id);
    const bool made = p_.is(id, Kind::kCall) || p_.is(id, Kind::kObject);
    if (made && rule->module.starts_with("numpy")) return numpy(id, *rule);
    if (made && rule->name == "BytesIO") return bytes_io(id);
    const auto items = p_.items(id);
    if (p_.is(id, Kind::kList)) {
      w_.empty_list().put();
      return each(items.size(), write_items, [&](size_t i) { return value(items[i], depth + 1); });
    }
    if (p_.is(id, Kind::kTuple)) {
      if (items.size() > 3) w_.mark();
      for (const NodeId item : items) RETURN_IF_ERROR(value(item, depth + 1));
      w_.tuple(items.size());
      if (!items.empty()) w_.put();
      return fine();
    }
    if (p_.is(id, Kind::kDict) && !p_.configuration(id)) return dict(id, depth);
    return plain(id);
  }

  /// The items of a list or dict: the first error, since the pickle's own functions know none.
  template <class Fill, class Item>
  Status each(size_t count, const Fill& fill, const Item& item) {
    Status status = fine();
    fill(w_, count, [&](size_t i) {
      if (status.ok()) status = item(i);
    });
    return status;
  }

  Status plain(NodeId id) {
    ASSIGN_OR_RETURN(made, plain_value(p_, id, what_, left_ + 1, budget_));
    left_ -= std::min(left_, made.count() - 1);  // itself is counted
    write_value(w_, made);
    return fine();
  }

  Status dict(NodeId id, int depth) {
    if (const auto key = p_.repeated_key(id))
      return bad(what_ + ": has the key " + printable(*key) + " twice");
    if (const auto key = p_.repeated_number(id))
      return bad(what_ + ": has the key " + *key + " twice: Python takes 1, 1.0 and True for one");
    const auto items = p_.items(id);
    for (size_t i = 0; i < items.size(); i += 2) {
      if (!hashable(p_, items[i], left_, depth))
        return bad(what_ +
                   ": has a key that is a list, a dict or a set, which Python does not allow");
    }
    const bool ordered = p_.ordered(id);
    if (ordered) {
      w_.global("collections", "OrderedDict").tuple(0).call().put();
    } else {
      w_.empty_dict().put();
    }
    const auto fill = [ordered](PickleWriter& to, size_t count, const auto& entry) {
      write_entries(to, count, ordered, entry);
    };
    RETURN_IF_ERROR(each(items.size() / 2, fill, [&](size_t i) -> Status {
      RETURN_IF_ERROR(value(items[2 * i], depth + 1));
      return value(items[2 * i + 1], depth + 1);
    }));
    const NodeId attributes = p_.attributes(id);  // such as `_metadata` of a module's state dict
    if (attributes == kNoNode) return fine();
    if (!p_.is(attributes, Kind::kDict))
      return bad(what_ + ": has an OrderedDict whose attributes are not a dict");
    RETURN_IF_ERROR(value(attributes, depth + 1));
    w_.build();
    return fine();
  }

  Status tensor(NodeId id) {
    ASSIGN_OR_RETURN(node, read_tensor(p_, id, storages_, what_));
    if (!node.alias || !node.stored.cls.empty() || node.is_local || !node.dropped.empty())
      return bad(what_ + ": holds a tensor of a class of its own");
    const Payload& payload = node.stored.parts[0].second;
    const auto [known, is_new] = numbers_.emplace(node.alias->storage, keys_.size());
    if (is_new) keys_.push_back(node.alias->storage);
    write_tensor(w_, {*node.dtype, std::to_string(known->second), payload.record.size,
                      payload.first, payload.shape, payload.stride, node.gradient});
    return fine();
  }

  /// A dtype of numpy: its code ("f4"), and the bytes of an element.
  struct Element {
    std::string code;
    uint64_t bytes;
  };

  /// A dtype of plain numbers in this machine's byte order; what others refer to is not looked at.
  Result<Element> element(NodeId id) const {
    const GlobalRule* rule = p_.is(id, Kind::kCall) ? p_.global(id) : nullptr;
    if (rule == nullptr || rule->name != "dtype")
      return bad(what_ + ": holds something of numpy without a dtype");
    const std::string code(p_.text(p_.item(p_.item(id, 1), 0)));
    const uint64_t bytes = numpy_width(code);
    if (bytes == 0)
      return bad(what_ + ": holds numpy's dtype " + printable(code) + ", which is not a number");
    const NodeId order = p_.item(p_.item(id, 2), 1);
    if (p_.is(order, Kind::kString) && p_.text(order) == ">")
      return bad(what_ + ": holds numbers of numpy in the byte order of another machine");
    return Element{code, bytes};
  }
  Result<std::string> bytes_of(NodeId id) {
    if (id != kNoNode) {
      ASSIGN_OR_RETURN(made, plain_value(p_, id, what_, left_, budget_));
      if (made.is(Value::Kind::kBytes)) return std::move(made.text);
    }
    return bad(what_ + ": holds something else where bytes were expected");
  }

  /// What numpy calls a dtype: "f8", "U3".
  std::string code_of(NodeId dtype) const {
    return p_.is(dtype, Kind::kCall) ? std::string(p_.text(p_.item(p_.item(dtype, 1), 0))) : "";
  }
  /// np.str_ and np.bytes_, which are written as Python's.
  static bool is_text(const std::string& code) {
    return code.starts_with('U') || code.starts_with('S');
  }

  Status numpy(NodeId id, const GlobalRule& rule) {
    constexpr const char* kModule = "numpy.core.multiarray";  // which every numpy has for pickles
    const NodeId arguments = p_.item(id, 1);
    if (rule.name == "dtype") {
      ASSIGN_OR_RETURN(of, element(id));
      write_dtype(w_, of.code);
      return fine();
    }
    if (rule.name == "scalar") {
      if (const std::string code = code_of(p_.item(arguments, 0)); is_text(code)) {
        ASSIGN_OR_RETURN(content, bytes_of(p_.item(arguments, 1)));
        const Value text = numpy_text(code, content);
        if (text.is(Value::Kind::kNone)) return bad(what_ + ": holds a text of numpy that is none");
        if (text.is(Value::Kind::kText)) w_.text(text.text);
        if (text.is(Value::Kind::kBytes)) w_.bytes(text.text);
        return fine();
      }
      ASSIGN_OR_RETURN(of, element(p_.item(arguments, 0)));
      ASSIGN_OR_RETURN(content, bytes_of(p_.item(arguments, 1)));
      if (content.size() != of.bytes)
        return bad(what_ + ": holds a number of numpy of " + std::to_string(content.size()) +
                   " bytes, where its dtype has " + std::to_string(of.bytes));
      w_.global(kModule, "scalar");
      write_dtype(w_, of.code);
      w_.bytes(content).tuple(2).put().call().put();
      return fine();
    }
    // (version, shape, dtype, by columns, bytes)
    const NodeId state = p_.item(id, 2), sizes = p_.item(state, 1), columns = p_.item(state, 3);
    const auto natural = [&](NodeId n) { return p_.is(n, Kind::kInt) && p_.integer(n) >= 0; };
    if (!p_.is(state, Kind::kTuple) || !p_.is(sizes, Kind::kTuple) ||
        !p_.is(columns, Kind::kBool) || !std::ranges::all_of(p_.items(sizes), natural) ||
        p_.items(sizes).size() > 32)
      return bad(what_ + ": holds an array that is not laid out as numpy does");
    ASSIGN_OR_RETURN(of, element(p_.item(state, 2)));
    ASSIGN_OR_RETURN(content, bytes_of(p_.item(state, 4)));
    Shape shape;
    for (const NodeId n : p_.items(sizes)) shape.push_back(p_.integer(n));
    ASSIGN_OR_RETURN(count, elements(shape, what_));
    if (content.size() != count * of.bytes)
      return bad(what_ + ": holds an array of " + shape_text(shape) + " in " +
                 std::to_string(content.size()) + " bytes");
    write_array(w_, array_value({kModule, of.code, shape, p_.integer(columns) != 0}, "",
                                std::move(content)));
    return fine();
  }

  /// An io.BytesIO: its bytes, and where it stands.
  Status bytes_io(NodeId id) {
    const NodeId state = p_.item(id, 2), at = p_.item(state, 1);
    ASSIGN_OR_RETURN(content, bytes_of(p_.item(state, 0)));
    const NodeId attributes = p_.item(state, 2);
    if (!p_.is(at, Kind::kInt) || p_.integer(at) < 0 ||
        !(p_.is(attributes, Kind::kNone) || p_.items(attributes).empty()))
      return bad(what_ + ": holds an io.BytesIO that Python does not write so");
    w_.global("_io", "BytesIO").object().put();
    w_.bytes(content).integer(p_.integer(at)).none().tuple(3).put().build();
    return fine();
  }

  const Pickle& p_;
  ArchiveStorages storages_;
  const std::string& what_;
  PickleWriter w_;
  uint64_t left_ = kMaxPlainValues;
  PickleBudget budget_;
  std::map<std::string, size_t> numbers_;
  std::vector<std::string> keys_;
};

Result<std::string> content_of(const File& file, const ZipIndex& index, const ZipRecord& record,
                               const std::string& what) {
  RETURN_IF_ERROR(check_crc(file, index, record, what));
  std::string bytes(record.size, '\0');
  RETURN_IF_ERROR(file.read(record.offset, bytes.data(), bytes.size()));
  return bytes;
}

/// What was understood of an archive.
struct Understood {
  ZipIndex index;
  std::string pickle;             // serialized again
  std::vector<std::string> keys;  // of the storages that it names, by their new numbers
};

Result<Understood> understand(const File& whole, const FileExtent& extent,
                              const std::string& what) {
  const BufferedFile file(whole, extent.offset, extent.offset + extent.length);
  ASSIGN_OR_RETURN(index, read_zip(file, extent.offset, extent.length, what));
  const ZipRecord* data = index.find("data.pkl");
  if (data == nullptr) return bad(what + ": is not an archive of torch.save");
  if (data->size > kMaxItemPickle)
    return too_large(what + ": its pickle has " + std::to_string(data->size) +
                     " bytes, more than the limit of " + std::to_string(kMaxItemPickle));
  if (const ZipRecord* order = index.find("byteorder")) {
    ASSIGN_OR_RETURN(text, content_of(file, index, *order, what));
    if (text != "little") return bad(what + ": was written by a big-endian machine");
  }
  ASSIGN_OR_RETURN(bytes, content_of(file, index, *data, what));
  ASSIGN_OR_RETURN(pickle, read_pickle(std::move(bytes), value_globals(), what));
  ValueWriter writer(pickle, index, what);
  ASSIGN_OR_RETURN(made, writer.pickle());
  std::vector<std::string> keys = writer.keys();
  return Understood{std::move(index), std::move(made), std::move(keys)};
}

}  // namespace

Status check_value_archive(const File& file, const FileExtent& extent, const std::string& what) {
  const auto understood = understand(file, extent, what);
  return understood.ok() ? fine() : Status(understood.error());
}

Result<std::string> value_archive(const File& file, const FileExtent& extent,
                                  const std::string& what) {
  ASSIGN_OR_RETURN(of, understand(file, extent, what));
  std::string out;
  Output to(&out);
  ZipWriter zip(to);
  RETURN_IF_ERROR(zip.record("data.pkl", of.pickle));
  RETURN_IF_ERROR(zip.record("byteorder", "little"));
  for (size_t i = 0; i < of.keys.size(); ++i) {
    ASSIGN_OR_RETURN(content,
                     content_of(file, of.index, *of.index.find("data/" + of.keys[i]), what));
    RETURN_IF_ERROR(zip.record("data/" + std::to_string(i), content));
  }
  RETURN_IF_ERROR(zip.close());
  return out;
}

namespace {

/// A directory's item, its transform undone.
struct Item {
  std::string what;
  FileExtent extent;
  std::shared_ptr<const File> file;
};

Result<Item> item_of(const Manifest& manifest, const Blob& blob) {
  RETURN_IF_ERROR(check_single(blob));
  Container& container = *manifest.container;
  const std::string what =
      container.files().shown(blob.extent.file) + ": " + printable(flat_name(blob.path));
  ASSIGN_OR_RETURN(extent, container.plain(blob.extent, what));
  ASSIGN_OR_RETURN(file, container.files().open(extent.file));
  return Item{what, extent, std::move(file)};
}

}  // namespace

Result<std::string> value_archive(const Manifest& manifest, const Blob& blob) {
  ASSIGN_OR_RETURN(item, item_of(manifest, blob));
  return value_archive(*item.file, item.extent, item.what);
}

Status check_value_archive(const Manifest& manifest, const Blob& blob) {
  ASSIGN_OR_RETURN(item, item_of(manifest, blob));
  ASSIGN_OR_RETURN(of, understand(*item.file, item.extent, item.what));
  for (const std::string& key : of.keys)
    RETURN_IF_ERROR(check_crc(*item.file, of.index, *of.index.find("data/" + key), item.what));
  return fine();
}

}  // namespace lowbit::ckpt
