// One item of a DCP directory: a whole torch.save archive that holds a tensor or a small value.
#pragma once

#include <cstdint>
#include <string>

#include "container/manifest.h"
#include "container/tensor_node.h"
#include "container/zip.h"
#include "pickle/value.h"

namespace lowbit::ckpt {

/// The tensor in an item, plain or a subclass.
Result<TensorNode> read_stored(const File& file, const Place& place, const std::string& what);
/// The plain tensor in an item: known dtype, strides inside the record, no element twice. `what` names it
/// in errors.
Result<Payload> read_payload(const File& file, const Place& place, const std::string& what);
/// The value of an item that holds no tensor; an error where it holds anything but plain values.
Result<Value> read_value(const File& file, const Place& place, const std::string& what);
/// The globals that plain values may name: torch's dtypes, Size, device, OrderedDict.
const std::vector<GlobalRule>& plain_globals();

/// Writes an item, byte for byte as torch.save would (but for the serialization id, which is 0):
/// tensor data follows through `zip.data`; then call finish_tensor.
Status begin_tensor(ZipWriter& zip, const Dtype& dtype, const Shape& shape);
Status finish_tensor(ZipWriter& zip);

}  // namespace lowbit::ckpt
