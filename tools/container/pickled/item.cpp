#include "container/pickled/item.h"

#include <algorithm>

#include "container/pickled/globals.h"
#include "io/read/buffered_file.h"
#include "io/text.h"
#include "pickle/plain.h"
#include "pickle/reader.h"
#include "pickle/writer.h"

namespace lowbit::ckpt {
namespace {

struct ItemArchive {
  ZipIndex index;
  std::string pickle;
};

/// Whether an item is a file of safetensors, as torch 2.13 writes items on demand: the length of
/// its header, then JSON.
Result<bool> is_safetensors(const File& file, const FileExtent& extent) {
  char head[9] = {};
  if (extent.length <= sizeof head) return false;
  RETURN_IF_ERROR(file.read(extent.offset, head, sizeof head));
  uint64_t header = 0;
  for (int i = 0; i < 8; ++i)
    header |= static_cast<uint64_t>(static_cast<uint8_t>(head[i])) << (8 * i);
  return head[8] == '{' && header <= extent.length - 8;
}

Result<ItemArchive> open_item(const File& whole, const FileExtent& extent,
                              const std::string& what) {
  const BufferedFile file(whole, extent.offset, extent.offset + extent.length);
  ItemArchive out;
  Result<ZipIndex> found = read_zip(file, extent.offset, extent.length, what);
  if (!found.ok()) {
    ASSIGN_OR_RETURN(other, is_safetensors(file, extent));
    if (!other) return found.error();
    return bad(
        what +
        ": is an item in safetensors, and items are read only as torch.save writes them. Load "
        "the checkpoint with torch, and save it with SerializationFormat.TORCH_SAVE");
  }
  ZipIndex& index = found.value();
  const ZipRecord* data = index.find("data.pkl");
  if (data == nullptr || index.find("version") == nullptr)
    return bad(what + ": is not an archive of torch.save");
  if (const ZipRecord* order = index.find("byteorder")) {
    std::string text(std::min<uint64_t>(order->size, 16), '\0');
    RETURN_IF_ERROR(file.read(order->offset, text.data(), text.size()));
    if (text != "little") return bad(what + ": was written by a big-endian machine");
  }
  if (data->size > kMaxItemPickle)
    return too_large(what + ": its pickle has " + std::to_string(data->size) +
                     " bytes, more than the limit of " + std::to_string(kMaxItemPickle));
  RETURN_IF_ERROR(check_crc(file, index, *data, what));
  out.pickle.resize(data->size);
  RETURN_IF_ERROR(file.read(data->offset, out.pickle.data(), out.pickle.size()));
  out.index = std::move(index);
  return out;
}

/// The storages of one item.
class ItemStorages : public Storages {
 public:
  ItemStorages(const ZipIndex& index, uint32_t file) : index_(index), file_(file) {}
  Result<Record> find(const StorageName& name, const std::string& what) override {
    const ZipRecord* r = index_.find("data/" + name.key);
    // Items that others write leave out a record of no bytes.
    if (r == nullptr && name.count == 0) return Record{};
    if (r == nullptr) return bad(what + ": its record data/" + printable(name.key) + " is missing");
    return Record{r->name, file_, r->offset, r->size, r->crc, index_.has_crcs};
  }

 private:
  const ZipIndex& index_;
  uint32_t file_;
};

}  // namespace

Result<TensorNode> read_stored(const File& file, const FileExtent& extent,
                               const std::string& what) {
  ASSIGN_OR_RETURN(archive, open_item(file, extent, what));
  ASSIGN_OR_RETURN(p, read_pickle(std::move(archive.pickle), tensor_globals(), what));
  ItemStorages storages(archive.index, extent.file);
  ASSIGN_OR_RETURN(node, read_tensor(p, p.root, storages, what));
  if (node.is_expanded)  // torch saves a copy
    return bad(what + ": its strides give one value to many elements");
  return node;
}

Result<Value> read_value(const File& file, const FileExtent& extent, const std::string& what) {
  ASSIGN_OR_RETURN(archive, open_item(file, extent, what));
  ASSIGN_OR_RETURN(pickle, read_pickle(std::move(archive.pickle), tree_globals(), what));
  constexpr uint64_t kAlways = 1u << 19;  // also of few bytes: torch writes a shared list once
  return plain_value(pickle, pickle.root, what,
                     std::max(kAlways, value_limit(pickle, extent.length)));
}

Status begin_tensor(ZipWriter& zip, const Dtype& dtype, const Shape& shape) {
  PickleWriter pickle(2);
  const uint64_t bytes = volume(shape) * static_cast<uint64_t>(dtype.bytes);
  write_tensor(pickle, {dtype, "0", bytes, 0, shape, row_major(shape)});
  RETURN_IF_ERROR(zip.record("data.pkl", pickle.finish()));
  RETURN_IF_ERROR(zip.record(".format_version", "1"));
  RETURN_IF_ERROR(zip.record(".storage_alignment", "64"));
  RETURN_IF_ERROR(zip.record("byteorder", "little"));
  return zip.begin("data/0", bytes);
}

Status finish_tensor(ZipWriter& zip) {
  RETURN_IF_ERROR(zip.end());
  return zip.close();
}

}  // namespace lowbit::ckpt
