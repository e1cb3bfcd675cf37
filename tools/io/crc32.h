// The CRC-32 of zip records, and how two of neighbours make that of both.
#pragma once

#include <cstdint>

namespace lowbit::ckpt {

/// The CRC of bytes whose beginning has the CRC `before` (0 for none).
uint32_t crc32(uint32_t before, const void* data, uint64_t bytes);

/// The CRC of A followed by B, from the CRCs of both and the length of B: pieces that are read in
/// any order, by any thread, still give the CRC of the whole.
uint32_t crc32_joined(uint32_t a, uint32_t b, uint64_t b_bytes);

}  // namespace lowbit::ckpt
