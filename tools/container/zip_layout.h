// Numbers of the zip format that reader and writer share.
#pragma once

#include <cstdint>

namespace lowbit::ckpt {

constexpr uint32_t kLocal = 0x04034b50, kDescriptor = 0x08074b50, kCentral = 0x02014b50,
                   kEnd = 0x06054b50, kEnd64 = 0x06064b50, kLocator64 = 0x07064b50;
/// A 32-bit field that holds this says that zip64's extra field has the value.
constexpr uint64_t kMax32 = 0xffffffff;
/// Data of a record starts at a multiple of this from the archive's start.
constexpr uint64_t kAlignment = 64;

}  // namespace lowbit::ckpt
