// Tensors in pickles: the one parser and the one writer for items of a DCP directory, torch.save's
// archives, and its legacy files.
#pragma once

#include <functional>
#include <string>

#include "container/manifest/manifest.h"
#include "pickle/reader.h"
#include "pickle/writer.h"

namespace lowbit::ckpt {

/// A storage, as a pickle refers to it.
struct StorageName {
  std::string key;
  const Dtype* dtype = nullptr;  // null: untyped, and `count` is bytes
  uint64_t count = 0;
};

/// Finds the bytes of a storage; the parser checks their number.
class Storages {
 public:
  virtual ~Storages() = default;
  virtual Result<Record> find(const StorageName& name, const std::string& what) = 0;
};

/// A tensor as its pickle describes it.
struct TensorNode {
  Stored stored;  // one part without a name, or a subclass
  const Dtype* dtype = nullptr;
  Shape shape;
  std::optional<Alias> alias;  // of a plain one
  Gradient gradient;
  bool is_local = false;  // what one rank has of a DTensor of shape `whole`
  Shape whole;
  // Not empty: a local part of any shape is not the whole, and what its values are ("a summand").
  std::string share;
  bool is_expanded = false;  // a dimension of stride 0: one value stands for many elements
  std::string dropped;       // what is not kept ("attributes of a tensor"); usually empty
};

/// A tensor to be written: how it views a storage of so many bytes, which is called `key`.
struct StorageView {
  const Dtype& dtype;
  std::string key;
  uint64_t bytes;
  uint64_t first;  // in elements
  Shape shape, stride;
  Gradient gradient = {};
};
/// Writes it in the words, and with the memo, of torch.save.
void write_tensor(PickleWriter& to, const StorageView& view);

/// Calls `use` with each storage that a pickle names anywhere, also in objects that are not looked
/// at, until it fails. One that is not named as torch does is left out.
Status for_storages(const Pickle& pickle, const std::function<Status(const StorageName&)>& use);
/// Whether a node is a tensor of any kind.
bool is_tensor(const Pickle& pickle, NodeId node);
/// The tensor of a node. Its strides must stay inside the storage and use no element twice; a kind
/// without dense elements is an error that names it. `what` names the tensor in errors.
Result<TensorNode> read_tensor(const Pickle& pickle, NodeId node, Storages& storages,
                               const std::string& what);

}  // namespace lowbit::ckpt
