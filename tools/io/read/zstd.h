// Decompression of one zstd frame into a nameless temporary file, in bounded memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "io/read/file.h"

namespace lowbit::ckpt {

/// The content of bytes [offset, offset + length) of `file`, which must be exactly one frame with a
/// window of at most 8 MiB. More than `limit` bytes of content are an error. `what` names the frame
/// in errors.
Result<std::shared_ptr<File>> zstd_content(const File& file, uint64_t offset, uint64_t length,
                                           uint64_t limit, const std::string& what);

/// The first bytes of the content, at most `limit`; fewer if the frame is broken.
Result<std::string> zstd_beginning(const File& file, uint64_t offset, uint64_t length,
                                   uint64_t limit);

}  // namespace lowbit::ckpt
