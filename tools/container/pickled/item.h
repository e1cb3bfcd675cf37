// Items of a DCP directory: each is a torch.save archive of one tensor or one small value.
#pragma once

#include <cstdint>
#include <string>

#include "container/manifest/manifest.h"
#include "container/pickled/tensor_node.h"
#include "container/zip/zip.h"
#include "pickle/value.h"

namespace lowbit::ckpt {

/// The bytes of the pickle of one item, and of one value, whose arrays lie in the pickle itself.
constexpr uint64_t kMaxItemPickle = 256u << 20;

/// The tensor of an item, plain or a subclass. Its dtype is known, its strides stay inside the
/// record and use no element twice. `what` names the item in errors.
Result<TensorNode> read_stored(const File& file, const FileExtent& extent, const std::string& what);
/// The value of an item of a value, opaque where it is an object; an error if it names what no file
/// may.
Result<Value> read_value(const File& file, const FileExtent& extent, const std::string& what);

/// Begins an item: the bytes are those of torch.save, except for the serialization id, which is 0.
/// The tensor's data follows through `zip.data`, then finish_tensor.
Status begin_tensor(ZipWriter& zip, const Dtype& dtype, const Shape& shape);
Status finish_tensor(ZipWriter& zip);

}  // namespace lowbit::ckpt
