#include "container/common/archive.h"
#include "container/common/open.h"
#include "container/pickled/globals.h"
#include "container/safetensors/safetensors.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

using Entries = std::unordered_map<std::string, const SafetensorsEntry*>;

Payload payload_of(const SafetensorsEntry& e, uint64_t data) {
  Payload out;
  out.dtype = e.dtype;
  out.shape = e.shape;
  out.stride = row_major(e.shape);
  out.record = {e.name, 0, data + e.begin, e.end - e.begin, 0, false};
  return out;
}

/// Takes a tensor of the file for a leaf; each belongs to one.
Result<const SafetensorsEntry*> take(Entries& entries, const std::string& name,
                                     const std::string& what) {
  const auto known = entries.find(name);
  if (known == entries.end())
    return bad(what + ": __metadata__ places the tensor " + printable(name) +
               ", which is not there or is placed twice");
  const SafetensorsEntry* entry = known->second;
  entries.erase(known);
  return entry;
}

/// Leaves as our convention places them.
Status read_described(const Description& description, Entries entries, uint64_t data,
                      Archive& archive, Manifest& m) {
  std::vector<std::pair<bool, size_t>> order;
  for (const Described& leaf : description.leaves) {
    order.emplace_back(leaf.kind == Described::Kind::kValue,
                       leaf.kind == Described::Kind::kValue ? m.blobs.size() : m.tensors.size());
    if (leaf.kind == Described::Kind::kValue) {
      RETURN_IF_ERROR(archive.add(m, leaf.path, leaf.value));
      continue;
    }
    Tensor tensor{{}, leaf.path, leaf.dtype, leaf.shape, {}};
    Stored stored;
    if (leaf.kind == Described::Kind::kTensor) {
      ASSIGN_OR_RETURN(entry, take(entries, leaf.tensor, archive.what()));
      tensor.dtype = entry->dtype;
      tensor.shape = entry->shape;
      tensor.gradient = leaf.gradient;
      stored.parts.emplace_back("", payload_of(*entry, data));
    } else {
      if (!is_known_subclass(leaf.cls))
        return bad(archive.what() + ": " + printable(flat_name(leaf.path)) + ": is a " +
                   printable(leaf.cls) + ", which is not known");
      stored.cls = leaf.cls;
      stored.attributes = leaf.value;
      for (const auto& [name, in_file] : leaf.parts) {
        ASSIGN_OR_RETURN(entry, take(entries, in_file, archive.what()));
        stored.parts.emplace_back(name, payload_of(*entry, data));
      }
    }
    RETURN_IF_ERROR(archive.add(m, std::move(tensor), std::move(stored)));
  }
  if (!entries.empty())
    return bad(archive.what() + ": __metadata__ does not place the tensor " +
               printable(entries.begin()->first));
  for (const auto& [is_blob, index] : order)
    m.order.push_back(is_blob ? m.tensors.size() + index : index);
  m.dicts = description.dicts;
  return fine();
}

}  // namespace

Result<Manifest> read_safetensors(const std::string& path) {
  ASSIGN_OR_RETURN(archive, Archive::open(path));
  const std::string& what = archive->what();
  ASSIGN_OR_RETURN(file, archive->file());
  if (file->size() < 8) return bad(what + ": is too short for a safetensors file");
  uint64_t length = 0;
  RETURN_IF_ERROR(file->read(0, &length, 8));
  if (length > kMaxSafetensorsHeader || length > file->size() - 8)
    return bad(what + ": says that its header has " + std::to_string(length) + " bytes of " +
               std::to_string(file->size()) + "; it is cut off, or no safetensors file");
  std::string json(length, '\0');
  RETURN_IF_ERROR(file->read(8, json.data(), length));
  const uint64_t data = 8 + length;
  ASSIGN_OR_RETURN(header, parse_safetensors(json, file->size() - data, what));
  json = {};
  Manifest m;
  m.warnings = std::move(header.warnings);
  Entries entries;
  for (const SafetensorsEntry& e : header.entries) {
    entries.emplace(e.name, &e);
    archive->add(payload_of(e, data).record);
  }
  const std::string* convention = nullptr;
  for (const auto& [key, text] : header.metadata) {
    if (key == kConvention) {
      convention = &text;
    } else {
      m.facts.push_back("metadata: " + printable(key) + " = " + printable(text));
      m.texts.emplace_back(key, text);
    }
  }
  if (convention != nullptr) {
    ASSIGN_OR_RETURN(description, parse_description(*convention, what));
    RETURN_IF_ERROR(read_described(description, std::move(entries), data, *archive, m));
  } else {
    for (const SafetensorsEntry& e : header.entries) {
      Tensor tensor{{}, {Key(e.name)}, e.dtype, e.shape, {}};
      Stored stored;
      stored.parts.emplace_back("", payload_of(e, data));
      RETURN_IF_ERROR(archive->add(m, std::move(tensor), std::move(stored)));
    }
    for (size_t i = 0; i < m.tensors.size(); ++i) m.order.push_back(i);
  }
  m.facts.push_back("safetensors keeps no checksums");
  archive->finish(archive, ContainerKind::kSafetensors, m);
  return m;
}

}  // namespace lowbit::ckpt
