#include "container/item.h"

#include <libdeflate.h>

#include <algorithm>

#include "pickle/reader.h"
#include "pickle/writer.h"

namespace lowbit::ckpt {
namespace {

constexpr uint64_t kMostPickle = 64u << 20;

bool tensor_global(std::string_view module, std::string_view name) {
  if (module == "torch._utils")
    return name == "_rebuild_tensor_v2" || name == "_rebuild_tensor_v3" ||
           name == "_rebuild_parameter";
  if (module == "collections") return name == "OrderedDict";
  if (module == "torch.storage") return name == "UntypedStorage";
  return module == "torch" &&
         (find_storage(std::string(name)) != nullptr || find_dtype(std::string(name)) != nullptr);
}

bool no_global(std::string_view, std::string_view) { return false; }

Result<std::vector<ZipRecord>> open_item(const File& file, const Place& place,
                                         const std::string& what, std::string& pickle) {
  std::string magic(4, '\0');
  if (place.length >= 4) LB_CHECK(file.read(place.offset, magic.data(), 4));
  if (magic == "\x28\xb5\x2f\xfd")
    return bad(what + ": is compressed with zstd, which this version does not read");
  LB_TRY(records, read_zip(file, place.offset, place.length, what));
  const ZipRecord* data = find_record(records, "data.pkl");
  if (data == nullptr || find_record(records, "version") == nullptr)
    return bad(what + ": is not an archive of torch.save");
  if (const ZipRecord* order = find_record(records, "byteorder")) {
    std::string text(std::min<uint64_t>(order->size, 16), '\0');
    LB_CHECK(file.read(order->offset, text.data(), text.size()));
    if (text != "little") return bad(what + ": was written by a big-endian machine");
  }
  if (data->size > kMostPickle)
    return bad(what + ": its pickle has " + std::to_string(data->size) +
               " bytes, more than the limit");
  LB_CHECK(check_crc(file, *data, what));
  pickle.resize(data->size);
  LB_CHECK(file.read(data->offset, pickle.data(), pickle.size()));
  return records;
}

Result<Shape> integers(const Pickle& p, const Node& node, const std::string& what) {
  Shape out;
  if (node.kind != Kind::kTuple) return bad(what + ": a size or stride is not a tuple");
  for (const NodeId id : node.items) {
    if (p[id].kind != Kind::kInt || p[id].integer < 0)
      return bad(what + ": a size or stride is not a natural number");
    out.push_back(p[id].integer);
  }
  if (out.size() > 64) return bad(what + ": has more than 64 dimensions");
  return out;
}

std::string global_name(const Node& n) { return n.kind == Kind::kGlobal ? n.text : std::string(); }

}  // namespace

Status check_crc(const File& file, const ZipRecord& record, const std::string& what) {
  if (record.crc == 0) return fine();  // empty, or written with compute_crc32=False
  std::string buffer(std::min<uint64_t>(record.size, 1u << 20), '\0');
  uint32_t crc = 0;
  for (uint64_t at = 0; at < record.size; at += buffer.size()) {
    const uint64_t n = std::min<uint64_t>(buffer.size(), record.size - at);
    LB_CHECK(file.read(record.offset + at, buffer.data(), n));
    crc = libdeflate_crc32(crc, buffer.data(), n);
  }
  return crc == record.crc ? fine()
                           : Status(bad(what + ": the checksum of its record " +
                                        printable(record.name) + " is wrong: the file is damaged"));
}

Result<Payload> read_payload(const File& file, const Place& place, const std::string& what) {
  std::string bytes;
  LB_TRY(records, open_item(file, place, what, bytes));
  LB_TRY(p, read_pickle(bytes, tensor_global, what));
  const Node* call = &p[p.root];
  while (call->kind == Kind::kCall &&
         global_name(p.item(*call, 0)) == "torch._utils _rebuild_parameter") {
    call = &p.item(p.item(*call, 1), 0);
  }
  const std::string function = global_name(p.item(*call, 0));
  const bool v3 = function == "torch._utils _rebuild_tensor_v3";
  if (call->kind != Kind::kCall || (!v3 && function != "torch._utils _rebuild_tensor_v2"))
    return bad(what + ": holds something else than a tensor");
  const Node& arguments = p.item(*call, 1);
  const Node& storage = p.item(p.item(arguments, 0), 0);
  if (p.item(arguments, 0).kind != Kind::kPersistent || storage.kind != Kind::kTuple ||
      storage.items.size() != 5 || p.item(storage, 0).text != "storage" ||
      p.item(storage, 2).kind != Kind::kString || p.item(storage, 4).kind != Kind::kInt) {
    return bad(what + ": its tensor has no storage");
  }
  Payload out;
  const std::string type = global_name(p.item(storage, 1));
  const bool untyped = type == "torch.storage UntypedStorage";
  if (untyped) {
    const std::string dtype = v3 ? global_name(p.item(arguments, 6)) : "";
    out.dtype = dtype.starts_with("torch ") ? find_dtype(dtype.substr(6)) : nullptr;
  } else {
    out.dtype = type.starts_with("torch ") ? find_storage(type.substr(6)) : nullptr;
  }
  if (out.dtype == nullptr) return bad(what + ": has an unknown dtype");
  const Node& first = p.item(arguments, 1);
  if (first.kind != Kind::kInt || first.integer < 0) return bad(what + ": has no storage offset");
  out.first = static_cast<uint64_t>(first.integer);
  LB_TRY(shape, integers(p, p.item(arguments, 2), what));
  LB_TRY(stride, integers(p, p.item(arguments, 3), what));
  if (shape.size() != stride.size()) return bad(what + ": has other strides than sizes");
  LB_TRY(count, elements(shape, what));
  const ZipRecord* record = find_record(records, "data/" + p.item(storage, 2).text);
  const auto width = static_cast<uint64_t>(out.dtype->bytes);
  const int64_t held = p.item(storage, 4).integer;
  const uint64_t in_record = record == nullptr ? 0 : record->size;
  if (record == nullptr && held != 0) return bad(what + ": its record is missing");
  if (held < 0 || static_cast<uint64_t>(held) > in_record ||
      static_cast<uint64_t>(held) * (untyped ? 1 : width) != in_record) {
    return bad(what + ": its record has " + std::to_string(in_record) +
               " bytes, its pickle says otherwise");
  }
  out.contiguous = true;
  uint64_t run = 1, last = out.first;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] > 1) out.contiguous = out.contiguous && static_cast<uint64_t>(stride[i]) == run;
    if (count > 0 && shape[i] > 1) {
      if (stride[i] == 0) return bad(what + ": has a stride of 0, one value for many elements");
      if (static_cast<uint64_t>(stride[i]) > in_record ||
          static_cast<uint64_t>(shape[i]) > in_record + 1)
        return bad(what + ": reaches beyond its record");
      last += static_cast<uint64_t>(stride[i]) * static_cast<uint64_t>(shape[i] - 1);
      if (last > in_record) return bad(what + ": reaches beyond its record");
    }
    run *= static_cast<uint64_t>(std::max<int64_t>(shape[i], 1));
  }
  if (count > 0 && (last >= in_record / width)) return bad(what + ": reaches beyond its record");
  out.shape = std::move(shape);
  out.stride = std::move(stride);
  if (record != nullptr) out.record = *record;
  return out;
}

Result<Pickle> read_value(const File& file, const Place& place, const std::string& what) {
  std::string bytes;
  LB_TRY(records, open_item(file, place, what, bytes));
  return read_pickle(bytes, no_global, what);
}

Status begin_tensor(ZipWriter& zip, const Dtype& dtype, const Shape& shape) {
  LB_TRY(count, elements(shape, "a tensor to be written"));
  Shape stride(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;)
    stride[i - 1] = stride[i] * std::max<int64_t>(shape[i], 1);
  const bool typed = dtype.storage[0] != '\0';
  const uint64_t bytes = count * static_cast<uint64_t>(dtype.bytes);
  using namespace emit;
  const std::string cls =
      typed ? global("torch", dtype.storage) : global("torch.storage", "UntypedStorage");
  const std::string id = tuple({text("storage"), cls, text("0"), text("cpu"),
                                integer(static_cast<int64_t>(typed ? count : bytes))}) +
                         "Q";
  const std::string hooks = call(global("collections", "OrderedDict"), tuple({}));
  std::vector<std::string> arguments = {
      id, integer(0), integers(shape), integers(stride), boolean(false), hooks};
  if (!typed) arguments.push_back(global("torch", dtype.name));
  const std::string pickle =
      "\x80\x02" +
      call(global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3"),
           tuple(arguments)) +
      ".";
  LB_CHECK(zip.record("data.pkl", pickle));
  LB_CHECK(zip.record(".format_version", "1"));
  LB_CHECK(zip.record(".storage_alignment", "64"));
  LB_CHECK(zip.record("byteorder", "little"));
  return zip.begin("data/0", bytes);
}

Status finish_tensor(ZipWriter& zip) {
  LB_CHECK(zip.end());
  return zip.close();
}

}  // namespace lowbit::ckpt
