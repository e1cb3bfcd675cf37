// The CRC-32 of zip records, and the CRC of two neighbours from their own.
#pragma once

#include <cstdint>

namespace lowbit::ckpt {

/// The CRC of all bytes so far: `before` is that of the ones already read, 0 at the beginning.
uint32_t crc32(uint32_t before, const void* data, uint64_t bytes);

/// The CRC of A followed by B, from the CRCs of both and the length of B. Pieces may be read in any
/// order and by any thread, and still give the CRC of the whole.
uint32_t crc32_joined(uint32_t a, uint32_t b, uint64_t b_bytes);

}  // namespace lowbit::ckpt
