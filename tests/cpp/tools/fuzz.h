// What a fuzzer calls: every reader of untrusted bytes. The first byte chooses one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "container/dcp.h"
#include "container/item.h"
#include "pickle/reader.h"

namespace lowbit::ckpt {

/// True where the input was accepted. It may be anything; nothing may crash, leak, or take more
/// than its limits.
inline bool read_untrusted(std::string_view input) {
  if (input.empty()) return false;
  const std::string body(input.substr(1));
  switch (input[0] % 4) {
    case 0:
      return read_pickle(body, [](std::string_view, std::string_view) { return true; }, "fuzz",
                         {.bytes = 1u << 20, .nodes = 1u << 16, .stack = 1u << 16})
          .ok();
    case 1: {
      const auto manifest = parse_metadata(body, "fuzz");
      return manifest.ok() && check_coverage(manifest.value()).ok();
    }
    default: {
      const auto file = File::of_bytes(body, "fuzz");
      if (!file.ok()) return false;
      const Place place{"fuzz", 0, body.size()};
      if (input[0] % 4 == 2) return read_value(*file.value(), place, "fuzz").ok();
      const auto payload = read_payload(*file.value(), place, "fuzz");
      return payload.ok() && check_crc(*file.value(), payload.value().record, "fuzz").ok();
    }
  }
}

}  // namespace lowbit::ckpt
