// Values of a DCP directory that hold more than plain data: tensors, arrays of numpy, an
// io.BytesIO.
#pragma once

#include <string>

#include "container/manifest/manifest.h"
#include "io/read/file.h"

namespace lowbit::ckpt {

/// An item with any value, as a new archive of torch.save with what was understood:
/// plain data, and dense tensors, arrays and numbers of numpy and io.BytesIO anywhere in it.
/// Tensors are on the CPU. Anything else is an error: to unpickle it would be to run what it names.
/// `what` names the item in errors.
Result<std::string> value_archive(const File& file, const FileExtent& extent,
                                  const std::string& what);
/// The same of a directory's item.
Result<std::string> value_archive(const Manifest& manifest, const Blob& blob);
/// An error where `value_archive` would refuse the item. Values of tensors are not read.
Status check_value_archive(const File& file, const FileExtent& extent, const std::string& what);
/// The same of a directory's item, whose tensors' checksums are verified too: none is held in
/// memory.
Status check_value_archive(const Manifest& manifest, const Blob& blob);

}  // namespace lowbit::ckpt
