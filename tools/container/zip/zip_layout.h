// Constants of the zip format.
#pragma once

#include <cstdint>

namespace lowbit::ckpt {

constexpr uint32_t kLocal = 0x04034b50, kDescriptor = 0x08074b50, kCentral = 0x02014b50,
                   kEnd = 0x06054b50, kEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
/// This value in a 32-bit field means that the zip64 extra field has the real one.
constexpr uint64_t kMax32 = 0xffffffff;
/// The data of a record starts at a multiple of this, from the start of the archive.
constexpr uint64_t kAlignment = 64;

}  // namespace lowbit::ckpt
