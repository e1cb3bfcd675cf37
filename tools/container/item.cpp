#include "container/item.h"

#include <algorithm>

#include "io/text.h"
#include "pickle/plain.h"
#include "pickle/reader.h"
#include "pickle/writer.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kMostPickle = 64u << 20;

/// What the pickle of a plain tensor names.
const Allowlist& tensor_globals() {
  static const std::vector<GlobalRule> rules = [] {
    std::vector<GlobalRule> r = {{"torch._utils", "_rebuild_tensor_v2", "pinnbo?d"},
                                 {"torch._utils", "_rebuild_tensor_v3", "pinnbog?d"},
                                 {"torch._utils", "_rebuild_parameter", "tbo"},
                                 {"collections", "OrderedDict", ""},
                                 {"torch.storage", "UntypedStorage", nullptr}};
    for (const Dtype& d : all_dtypes()) {
      r.push_back({"torch", d.name, nullptr});
      if (d.storage[0] != '\0') r.push_back({"torch", d.storage, nullptr});
    }
    return r;
  }();
  static const Allowlist allowed{rules, true};
  return allowed;
}

struct Archive {
  ZipIndex index;
  std::string pickle;
};

Result<Archive> open_item(const File& file, const Place& place, const std::string& what) {
  Archive out;
  LB_TRY(index, read_zip(file, place.offset, place.length, what));
  const ZipRecord* data = index.find("data.pkl");
  if (data == nullptr || index.find("version") == nullptr)
    return bad(what + ": is not an archive of torch.save");
  if (const ZipRecord* order = index.find("byteorder")) {
    std::string text(std::min<uint64_t>(order->size, 16), '\0');
    LB_CHECK(file.read(order->offset, text.data(), text.size()));
    if (text != "little") return bad(what + ": was written by a big-endian machine");
  }
  if (data->size > kMostPickle)
    return bad(what + ": its pickle has " + std::to_string(data->size) +
               " bytes, more than the limit of " + std::to_string(kMostPickle));
  LB_CHECK(check_crc(file, index, *data, what));
  out.pickle.resize(data->size);
  LB_CHECK(file.read(data->offset, out.pickle.data(), out.pickle.size()));
  out.index = std::move(index);
  return out;
}

Result<Shape> naturals(const Pickle& p, NodeId tuple, const std::string& what) {
  Shape out;
  for (const NodeId id : p.items(tuple)) {
    if (p.integer(id) < 0) return bad(what + ": has a negative size or stride");
    out.push_back(p.integer(id));
  }
  if (out.size() > 64) return bad(what + ": has more than 64 dimensions");
  return out;
}

/// Whether the elements lie inside `held` elements, each in its own place: taken by rising stride,
/// each stride is longer than all that the smaller ones reach.
Status check_strides(const Payload& t, uint64_t held, const std::string& what) {
  if (volume(t.shape) == 0) return fine();
  std::vector<std::pair<uint64_t, uint64_t>> steps;  // stride, size
  for (size_t d = 0; d < t.shape.size(); ++d) {
    if (t.shape[d] > 1)
      steps.emplace_back(static_cast<uint64_t>(t.stride[d]), static_cast<uint64_t>(t.shape[d]));
  }
  std::sort(steps.begin(), steps.end());
  uint64_t reach = 0;  // the furthest element, from the first
  for (const auto& [stride, size] : steps) {
    if (stride <= reach)
      return bad(what + ": its strides " + shape_text(t.stride) +
                 " give one value to many elements");
    if (size - 1 > held / stride) return bad(what + ": reaches beyond its record");
    reach += stride * (size - 1);
  }
  return t.first < held && reach < held - t.first
             ? fine()
             : Status(bad(what + ": reaches beyond its record"));
}

}  // namespace

Result<Payload> read_payload(const File& file, const Place& place, const std::string& what) {
  LB_TRY(archive, open_item(file, place, what));
  LB_TRY(p, read_pickle(std::move(archive.pickle), tensor_globals(), what));
  NodeId call = p.root;
  for (int depth = 0; p.is(call, Kind::kCall) && p.global(call)->name == "_rebuild_parameter";
       ++depth) {
    if (depth == 4) return bad(what + ": holds a parameter of a parameter");
    call = p.item(p.item(call, 1), 0);
  }
  if (!p.is(call, Kind::kCall) || !p.global(call)->name.starts_with("_rebuild_tensor"))
    return bad(what + ": holds something else than a tensor");
  const NodeId arguments = p.item(call, 1), storage = p.item(p.item(arguments, 0), 0);
  if (!p.is(storage, Kind::kTuple) || p.items(storage).size() != 5 ||
      !p.is(p.item(storage, 0), Kind::kString) || p.text(p.item(storage, 0)) != "storage" ||
      !p.is(p.item(storage, 1), Kind::kGlobal) || !p.is(p.item(storage, 2), Kind::kString) ||
      !p.is(p.item(storage, 3), Kind::kString) || !p.is(p.item(storage, 4), Kind::kInt)) {
    return bad(what + ": its tensor has no storage");
  }
  Payload out;
  const std::string_view type = p.global(p.item(storage, 1))->name;
  const bool untyped = type == "UntypedStorage";
  const bool v3 = p.global(call)->name == "_rebuild_tensor_v3";
  if (v3 != untyped) return bad(what + ": its function and its storage do not go together");
  out.dtype = untyped ? find_dtype(p.global(p.item(arguments, 6))->name) : find_storage(type);
  if (out.dtype == nullptr)
    return bad(what + ": has the dtype or storage " + std::string(type) + ", which is unknown");
  const int64_t first = p.integer(p.item(arguments, 1));
  if (first < 0) return bad(what + ": has a negative storage offset");
  out.first = static_cast<uint64_t>(first);
  LB_TRY(shape, naturals(p, p.item(arguments, 2), what));
  LB_TRY(stride, naturals(p, p.item(arguments, 3), what));
  if (shape.size() != stride.size()) return bad(what + ": has other strides than sizes");
  LB_CHECK(elements(shape, what).ok() ? fine() : Status(bad(what + ": has an impossible size")));
  out.shape = std::move(shape);
  out.stride = std::move(stride);

  const std::string key(p.text(p.item(storage, 2)));
  const ZipRecord* record = archive.index.find("data/" + key);
  const int64_t held = p.integer(p.item(storage, 4));
  const auto width = static_cast<uint64_t>(out.dtype->bytes);
  const uint64_t bytes = record == nullptr ? 0 : record->size;
  if (record == nullptr && held != 0)
    return bad(what + ": its record data/" + printable(key) + " is missing");
  if (held < 0 || static_cast<uint64_t>(held) > bytes ||
      static_cast<uint64_t>(held) * (untyped ? 1 : width) != bytes || bytes % width != 0) {
    return bad(what + ": its record has " + std::to_string(bytes) +
               " bytes, its pickle says otherwise");
  }
  LB_CHECK(check_strides(out, bytes / width, what));
  if (record != nullptr)
    out.record = {record->name, place.file,  record->offset,
                  record->size, record->crc, archive.index.has_crcs};
  return out;
}

Result<Value> read_value(const File& file, const Place& place, const std::string& what) {
  LB_TRY(archive, open_item(file, place, what));
  static const Allowlist allowed{plain_globals(), false};
  LB_TRY(pickle, read_pickle(std::move(archive.pickle), allowed, what));
  return plain_value(pickle, pickle.root, what);
}

const std::vector<GlobalRule>& plain_globals() {
  static const std::vector<GlobalRule> rules = [] {
    std::vector<GlobalRule> r = {{"collections", "OrderedDict", ""},
                                 {"torch", "Size", "n"},
                                 {"torch", "device", "s?i"},
                                 {"torch", "strided", nullptr},
                                 {"torch.serialization", "_get_layout", "s"}};
    for (const Dtype& d : all_dtypes()) r.push_back({"torch", d.name, nullptr});
    return r;
  }();
  return rules;
}

namespace {

/// The pickle of a tensor in the words, and with the memo, of torch.save.
std::string tensor_pickle(const Dtype& dtype, const Shape& shape) {
  const bool typed = dtype.storage[0] != '\0';
  const uint64_t count = volume(shape), bytes = count * static_cast<uint64_t>(dtype.bytes);
  PickleWriter w(2);
  w.global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3").mark();
  w.mark().text("storage");
  if (typed) {
    w.global("torch", dtype.storage);
  } else {
    w.global("torch.storage", "UntypedStorage");
  }
  w.text("0").text("cpu").integer(static_cast<int64_t>(typed ? count : bytes)).tuple(5).put();
  w.persistent().integer(0);
  const auto sizes = [&w](const Shape& s) {
    w.integers(s);
    if (!s.empty()) w.put();
  };
  sizes(shape);
  sizes(row_major(shape));
  w.boolean(false).global("collections", "OrderedDict").tuple(0).call().put();
  if (!typed) w.global("torch", dtype.name);
  return w.tuple(7).put().call().put().finish();
}

}  // namespace

Status begin_tensor(ZipWriter& zip, const Dtype& dtype, const Shape& shape) {
  LB_CHECK(zip.record("data.pkl", tensor_pickle(dtype, shape)));
  LB_CHECK(zip.record(".format_version", "1"));
  LB_CHECK(zip.record(".storage_alignment", "64"));
  LB_CHECK(zip.record("byteorder", "little"));
  return zip.begin("data/0", volume(shape) * static_cast<uint64_t>(dtype.bytes));
}

Status finish_tensor(ZipWriter& zip) {
  LB_CHECK(zip.end());
  return zip.close();
}

}  // namespace lowbit::ckpt
