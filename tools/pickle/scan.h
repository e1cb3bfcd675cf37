// Where a pickle ends that is followed by something else.
#pragma once

#include <cstdint>
#include <string>

#include "io/file.h"

namespace lowbit::ckpt {

/// The bytes of the pickle at `offset`, its STOP included; only the lengths of opcodes are looked
/// at. An error where it is longer than `most`.
Result<std::string> pickle_at(const File& file, uint64_t offset, uint64_t most,
                              const std::string& what);

}  // namespace lowbit::ckpt
