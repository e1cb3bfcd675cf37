#include "policy/names.h"

#include <algorithm>

namespace lowbit {
namespace {

constexpr std::string_view kWrapperPrefixes[] = {
    "module.",
    "_fsdp_wrapped_module.",
    "_orig_mod.",
    "_checkpoint_wrapped_module.",
};

/// Whether the character continues a component. Every byte of a letter beyond ASCII does.
bool continues(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         byte >= 0x80;
}

}  // namespace

std::span<const std::string_view> wrapper_prefixes() { return kWrapperPrefixes; }

std::string clean_name(const std::string& name) {
  std::string clean;
  for (size_t i = 0; i < name.size();) {
    const std::string_view rest = std::string_view(name).substr(i);
    const auto* prefix = std::ranges::find_if(
        kWrapperPrefixes, [&](std::string_view each) { return rest.starts_with(each); });
    if (prefix != std::end(kWrapperPrefixes) && (i == 0 || !continues(name[i - 1]))) {
      i += prefix->size();
    } else {
      clean += name[i++];
    }
  }
  return clean;
}

uint32_t stream_of(const std::string& name) {
  uint32_t crc = 0xffffffffu;
  for (const char c : clean_name(name)) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320u : 0u);
  }
  return ~crc;
}

}  // namespace lowbit
