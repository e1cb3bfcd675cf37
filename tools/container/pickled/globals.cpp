#include "container/pickled/globals.h"

#include "container/manifest/dtype.h"

namespace lowbit::ckpt {
namespace {

/// The modules in which torchao's versions keep their optimizer states.
constexpr const char* kStateModules[] = {
    "torchao.optim.subclass_8bit",
    "torchao.optim.subclass_4bit",
    "torchao.optim.subclass_fp8",
    "torchao.prototype.low_bit_optim.subclass_8bit",
    "torchao.prototype.low_bit_optim.subclass_4bit",
    "torchao.prototype.low_bit_optim.subclass_fp8",
};
constexpr const char* kStateNames[] = {"OptimState8bit", "OptimState4bit", "OptimStateFp8"};

/// The parts of a DTensor's layout. They are parsed and never used.
constexpr GlobalRule kDistributed[] = {
    {"torch.distributed.tensor", "DTensor", nullptr},
    {"torch.distributed.tensor._api", "DTensor", nullptr},
    {"torch.distributed._tensor.api", "DTensor", nullptr},
    {"torch.distributed.tensor._dtensor_spec", "DTensorSpec", nullptr, true},
    {"torch.distributed.tensor._dtensor_spec", "TensorMeta", "x*", true},
    {"torch.distributed.tensor._dtensor_spec", "ShardOrderEntry", "x*", true},
    {"torch.distributed._tensor.placement_types", "DTensorSpec", nullptr, true},
    {"torch.distributed._tensor.placement_types", "TensorMeta", "x*", true},
    {"torch.distributed.tensor.placement_types", "Shard", nullptr, true},
    {"torch.distributed.tensor.placement_types", "_StridedShard", nullptr, true},
    {"torch.distributed.tensor.placement_types", "Replicate", nullptr, true},
    {"torch.distributed.tensor.placement_types", "Partial", nullptr, true},
    {"torch.distributed._tensor.placement_types", "Shard", nullptr, true},
    {"torch.distributed._tensor.placement_types", "Replicate", nullptr, true},
    {"torch.distributed._tensor.placement_types", "_Partial", nullptr, true},
    {"torch.distributed.device_mesh", "DeviceMesh", nullptr, true},
    {"torch.distributed._mesh_layout", "_MeshLayout", nullptr, true},
    {"torch.distributed._mesh_layout", "_FlatLayout", nullptr, true},
};

/// Tensors without dense elements. The allowlist has them so that their kind can be named.
struct Refused {
  const char *function, *kind;
};
constexpr Refused kRefused[] = {
    {"_rebuild_sparse_tensor", "a sparse tensor"},
    {"_rebuild_sparse_csr_tensor", "a sparse tensor"},
    {"_rebuild_qtensor", "a quantized tensor"},
    {"_rebuild_meta_tensor_no_storage", "a meta tensor, which has no values"},
    {"_rebuild_nested_tensor", "a nested tensor"},
    {"_rebuild_device_tensor_from_numpy", "a tensor kept as a numpy array"},
    {"_rebuild_device_tensor_from_cpu_tensor", "a tensor of a device that torch does not know"},
};

}  // namespace

const std::vector<GlobalRule>& plain_globals() {
  static const std::vector<GlobalRule> rules = [] {
    std::vector<GlobalRule> r = {{"collections", "OrderedDict", "?l"},
                                 {"collections", "Counter", "?w"},
                                 {"collections", "defaultdict", "?x"},
                                 {"torch", "Size", "n"},
                                 {"torch", "device", "s?i"},
                                 {"torch", "strided", nullptr},
                                 {"_codecs", "encode", "ss"},
                                 // lpmm keeps its settings in these, with empty sets in them.
                                 {"yacs.config", "CfgNode", nullptr, true},
                                 {"torch.serialization", "_get_layout", "s"}};
    for (const char* module : {"__builtin__", "builtins"}) {
      r.insert(r.end(), {{module, "set", "l"},
                         {module, "complex", "rr"},
                         {module, "bytearray", "?ys"},
                         {module, "bytes", "?y"}});
    }
    for (const Dtype& d : all_dtypes()) r.push_back({"torch", d.name, nullptr});
    return r;
  }();
  return rules;
}

const Allowlist& tensor_globals() {
  static const std::vector<GlobalRule> rules = [] {
    std::vector<GlobalRule> r = plain_globals();
    r.insert(r.end(), {{"torch._utils", "_rebuild_tensor", "pizz"},
                       {"torch._utils", "_rebuild_tensor_v2", "pizzbh?w"},
                       {"torch._utils", "_rebuild_tensor_v3", "pizzbhq?w"},
                       {"torch._utils", "_rebuild_parameter", "tbh"},
                       {"torch._utils", "_rebuild_parameter_with_state", "tbhx"},
                       {"torch._tensor", "_rebuild_from_type_v2", "qqux"},
                       {"torch._utils", "_rebuild_wrapper_subclass", "ggnnixx?b"},
                       {"torch", "Tensor", nullptr},
                       {"torch.nn.parameter", "Parameter", nullptr},
                       {"torch.storage", "UntypedStorage", nullptr}});
    for (const Refused& refused : kRefused) r.push_back({"torch._utils", refused.function, "x*"});
    for (const char* kind : {"QUInt8Storage", "QInt8Storage", "QInt32Storage", "QUInt4x2Storage",
                             "QUInt2x4Storage", "per_tensor_affine", "per_channel_affine"})
      r.push_back({"torch", kind, nullptr});
    for (const Dtype& d : all_dtypes()) {
      if (d.storage[0] != '\0') r.push_back({"torch", d.storage, nullptr});
    }
    for (const char* module : kStateModules) {
      for (const char* name : kStateNames) r.push_back({module, name, nullptr});
    }
    r.insert(r.end(), std::begin(kDistributed), std::end(kDistributed));
    return r;
  }();
  static const Allowlist allowed{rules, true};
  return allowed;
}

const Allowlist& tree_globals() {
  static const std::vector<GlobalRule> rules = [] {
    const auto known = tensor_globals().globals;
    std::vector<GlobalRule> r(known.begin(), known.end());
    for (const char* module : {"numpy.core.multiarray", "numpy._core.multiarray"}) {
      r.push_back({module, "scalar", "xx"});
      r.push_back({module, "_reconstruct", "xux", true});
    }
    r.push_back({"numpy", "dtype", "s?xx", true});
    r.push_back({"numpy", "ndarray", nullptr});
    // Where a rank's slice of a parameter lies, in the files of DeepSpeed's ZeRO.
    r.push_back({"deepspeed.utils.tensor_fragment", "fragment_address", nullptr, true});
    // The scale of the loss in runs in float16.
    r.push_back({"deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler", nullptr, true});
    // Methods of objects; the first releases of Python 3.11 pickle an enum's member so too.
    r.push_back({"builtins", "getattr", "cs"});
    r.push_back({"__builtin__", "getattr", "cs"});
    return r;
  }();
  static const Allowlist allowed{rules, true, true};
  return allowed;
}

const char* refused_kind(std::string_view function) {
  for (const Refused& refused : kRefused) {
    if (function == refused.function) return refused.kind;
  }
  return nullptr;
}

bool is_known_subclass(const std::string& cls) {
  for (const char* module : kStateModules) {
    for (const char* name : kStateNames) {
      if (cls == std::string(module) + "." + name) return true;
    }
  }
  return false;
}

}  // namespace lowbit::ckpt
