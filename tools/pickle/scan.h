// The end of a pickle that other data follows.
#pragma once

#include <cstdint>
#include <string>

#include "io/read/file.h"

namespace lowbit::ckpt {

/// The bytes of the pickle at `offset`, up to its STOP. Only the lengths of opcodes are read. A
/// pickle of more than `limit` bytes is an error.
Result<std::string> pickle_at(const File& file, uint64_t offset, uint64_t limit,
                              const std::string& what);

}  // namespace lowbit::ckpt
