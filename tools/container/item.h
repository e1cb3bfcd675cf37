// One item of a checkpoint: a whole torch.save archive that holds a tensor or a small value.
#pragma once

#include <cstdint>
#include <string>

#include "container/manifest.h"
#include "container/zip.h"
#include "pickle/value.h"

namespace lowbit::ckpt {

/// A tensor's values in a file.
struct Payload {
  const Dtype* dtype = nullptr;
  Shape shape, stride;  // stride in elements
  uint64_t first = 0;   // element of the record at index 0
  ZipRecord record;
  bool contiguous = false;
};

/// The tensor in an item: known dtype, strides inside the record, no element twice. `what` names it
/// in errors.
Result<Payload> read_payload(const File& file, const Place& place, const std::string& what);
/// The record's CRC against its bytes; a writer that computed none has 0.
Status check_crc(const File& file, const ZipRecord& record, const std::string& what);
/// The value of an item that holds no tensor; an error where it names anything but plain values.
Result<Pickle> read_value(const File& file, const Place& place, const std::string& what);

/// Writes an item whose tensor data follows through `zip.data`; then call finish_tensor.
Status begin_tensor(ZipWriter& zip, const Dtype& dtype, const Shape& shape);
Status finish_tensor(ZipWriter& zip);

}  // namespace lowbit::ckpt
