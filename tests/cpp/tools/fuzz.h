// What a fuzzer calls: every reader of untrusted bytes. The first byte chooses one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "container/dcp.h"
#include "container/item.h"
#include "container/tiling.h"
#include "pickle/plain.h"
#include "pickle/reader.h"

namespace lowbit::ckpt {

/// True where the input was accepted. It may be anything; nothing may crash, leak, or take more
/// than its limits.
inline bool read_untrusted(std::string_view input) {
  if (input.empty()) return false;
  const std::string body(input.substr(1));
  switch (input[0] % 4) {
    case 0: {
      static const Allowlist plain{plain_globals(), true};
      const auto pickle = read_pickle(body, plain, "fuzz",
                                      {.bytes = 1u << 20, .nodes = 1u << 16, .stack = 1u << 16});
      if (pickle.ok()) static_cast<void>(plain_value(pickle.value(), pickle.value().root, "fuzz"));
      return pickle.ok();
    }
    case 1: {
      const auto manifest = parse_metadata(body, "fuzz");
      if (!manifest.ok()) return false;
      for (const Tensor& t : manifest.value().tensors) {
        if (!check_tiling(t).ok()) return false;
      }
      return true;
    }
    default: {
      const auto file = File::of_bytes(body, "fuzz");
      if (!file.ok()) return false;
      const Place place{0, 0, 0, body.size()};
      if (input[0] % 4 == 2) return read_value(*file.value(), place, "fuzz").ok();
      return read_payload(*file.value(), place, "fuzz").ok();
    }
  }
}

}  // namespace lowbit::ckpt
