// The CRC-32 that a parameter's name is numbered by.
#pragma once

#include <cstdint>
#include <string_view>

namespace lowbit::ckpt {

/// zlib's; names are short, so bit by bit.
inline uint32_t crc32(std::string_view text) {
  uint32_t crc = 0xffffffffu;
  for (const char c : text) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

}  // namespace lowbit::ckpt
