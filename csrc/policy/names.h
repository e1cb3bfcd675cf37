// What a parameter is called whatever wraps its model, and the random bits that this name draws.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace lowbit {

/// What wrappers put into names: DistributedDataParallel, FSDP1, torch.compile, checkpointing.
std::span<const std::string_view> wrapper_prefixes();

/// The name without those prefixes, wherever a component begins: at the start, or after an ASCII
/// character other than a letter, a digit and an underscore.
std::string clean_name(const std::string& name);

/// The stream of random bits of a parameter: the CRC-32, as of zlib, of its clean name in UTF-8.
uint32_t stream_of(const std::string& name);

}  // namespace lowbit
