// One zstd frame, unpacked into a file that has no name: memory stays bounded.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "io/file.h"

namespace lowbit::ckpt {

/// Bytes [offset, offset + length) of `file`, which must be exactly one frame of at most `most`
/// bytes of content, packed with a window of at most 8 MiB. `what` names it in errors.
Result<std::shared_ptr<File>> zstd_content(const File& file, uint64_t offset, uint64_t length,
                                           uint64_t most, const std::string& what);

/// The first bytes of the content, at most `most`; fewer where the frame is broken.
Result<std::string> zstd_beginning(const File& file, uint64_t offset, uint64_t length,
                                   uint64_t most);

}  // namespace lowbit::ckpt
