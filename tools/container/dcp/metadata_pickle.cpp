#include "container/dcp/metadata_pickle.h"

#include "container/manifest/dtype.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";

}  // namespace

const Allowlist& metadata_globals() {
  static const std::vector<GlobalRule> rules = [] {
    std::vector<GlobalRule> r = {
        {kMetadataModule, "Metadata", nullptr, true},
        {kMetadataModule, "TensorStorageMetadata", nullptr, true},
        {kMetadataModule, "BytesStorageMetadata", nullptr, true},
        {kMetadataModule, "ChunkStorageMetadata", nullptr, true},
        {kMetadataModule, "TensorProperties", nullptr, true},
        {kMetadataModule, "MetadataIndex", nullptr, true},
        {kMetadataModule, "StorageMeta", nullptr, true},
        {kMetadataModule, "_MEM_FORMAT_ENCODING", "i"},
        {kMetadataModule2_2, "TensorProperties", nullptr, true},  // torch 2.2 and older
        {kMetadataModule2_2, "MEM_FORMAT_ENCODING", "i"},
        {"torch.distributed.checkpoint.filesystem", "_StorageInfo", nullptr, true},
        // What Megatron-Core keeps there of its save: the plans of all ranks.
        {"torch.distributed.checkpoint.planner", "SavePlan", nullptr, true},
        {"torch.distributed.checkpoint.planner", "WriteItem", nullptr, true},
        {"torch.distributed.checkpoint.planner", "TensorWriteData", nullptr, true},
        {"torch.distributed.checkpoint.planner", "BytesIOWriteData", nullptr, true},
        {"torch.distributed.checkpoint.planner", "WriteItemType", "i"},
        {"torch.distributed.checkpoint.filesystem", "_StoragePrefix", nullptr, true},
        {"megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan", nullptr, true},
        {"megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata", nullptr, true},
        {"torch", "Size", "n"},
        {"torch.serialization", "_get_layout", "s"},
        // The first releases of Python 3.11 pickle an enum's member by its name.
        {"builtins", "getattr", "mf"},
        {"__builtin__", "getattr", "mf"}};
    for (const std::string_view module : {"pathlib", "pathlib._local"}) {
      for (const std::string_view name :
           {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"})
        r.push_back({module, name, "s*"});
    }
    for (const Dtype& d : all_dtypes()) r.push_back({"torch", d.name, nullptr});
    // Dtypes whose tensors are not read: quantized ones, and bits without a meaning.
    for (const char* name :
         {"quint8",  "qint8",   "qint32", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8",
          "bits2x4", "bits4x2", "uint1",  "uint2",    "uint3",    "uint4", "uint5",  "uint6",
          "uint7",   "int1",    "int2",   "int3",     "int4",     "int5",  "int6",   "int7"})
      r.push_back({"torch", name, nullptr});
    return r;
  }();
  static const Allowlist allowed{rules, false};
  return allowed;
}

Result<NodeId> MetadataPickle::state_of(NodeId object, std::string_view cls) const {
  const GlobalRule* rule = p_.global(object);
  const NodeId state = p_.item(object, 2);
  if (!p_.is(object, Kind::kObject) || rule->name != cls || !p_.is(state, Kind::kDict))
    return no("is not laid out as torch does: expected a " + std::string(cls));
  if (const auto key = p_.repeated_key(state))
    return no("has a " + std::string(cls) + " that says " + printable(*key) + " twice");
  return state;
}

Result<Shape> MetadataPickle::size(NodeId node) const {
  if (p_.is(node, Kind::kCall)) node = p_.item(p_.item(node, 1), 0);
  if (!p_.is(node, Kind::kTuple) && !p_.is(node, Kind::kList)) return no("expected a size");
  Shape out;
  for (const NodeId id : p_.items(node)) {
    if (!p_.is(id, Kind::kInt) || p_.integer(id) < 0)
      return no("has a size that is not a natural number");
    out.push_back(p_.integer(id));
  }
  if (out.size() > 64) return no("has a size of more than 64 dimensions");
  return out;
}

}  // namespace lowbit::ckpt
