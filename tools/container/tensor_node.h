// From a node of a pickle to the tensor that torch would build from it: one parser for the items of
// a DCP directory, torch.save's archives, and its files of old.
#pragma once

#include <string>

#include "container/manifest.h"
#include "pickle/reader.h"

namespace lowbit::ckpt {

/// What pickles of tensors, wrappers and plain values may name.
const Allowlist& tensor_globals();

/// A storage as a pickle names it.
struct StorageName {
  std::string key;
  const Dtype* dtype = nullptr;  // null: untyped, and `count` is bytes
  uint64_t count = 0;
};

/// Where the bytes of storages lie. They must be as many as the name says.
class Storages {
 public:
  virtual ~Storages() = default;
  virtual Result<Record> find(const StorageName& name, const std::string& what) = 0;
};

struct TensorNode {
  Stored stored;  // one part without a name, or a subclass
  const Dtype* dtype = nullptr;
  Shape shape;
  std::optional<Alias> alias;  // of a plain one
  bool is_local = false;       // one rank's part of a DTensor of shape `whole`
  Shape whole;
  std::string dropped;  // what is not kept ("attributes of a tensor"); empty as a rule
};

/// Whether `cls` ("module.Name") is a tensor subclass that is read, and may be written.
bool is_known_subclass(const std::string& cls);
/// Whether a node gives a tensor, of whatever kind.
bool is_tensor(const Pickle& pickle, NodeId node);
/// Strides stay inside the storage and use no element twice; kinds that have no dense elements are
/// refused by name. `what` names it in errors.
Result<TensorNode> read_tensor(const Pickle& pickle, NodeId node, Storages& storages,
                               const std::string& what);

}  // namespace lowbit::ckpt
