// One record of an archive: bytes of a file, with the checksum that their writer computed.
#pragma once

#include <cstdint>
#include <string>

namespace lowbit::ckpt {

/// A run of bytes of a file, with its CRC-32 where the container keeps one.
struct Record {
  std::string name;
  uint32_t file = 0;  // number in Manifest::file_names
  uint64_t offset = 0, size = 0;
  uint32_t crc = 0;
  bool has_crc = false;
};

}  // namespace lowbit::ckpt
