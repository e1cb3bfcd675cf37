// Reads a pickle into inert values. Opcodes and globals are an allowlist, every length is checked
// against what is left before anything is allocated, and everything has a limit.
#pragma once

#include <string>
#include <string_view>

#include "io/status.h"
#include "pickle/value.h"

namespace lowbit::ckpt {

struct PickleLimits {
  uint64_t bytes = 1ull << 30;
  uint64_t nodes = 1ull << 25;
  uint64_t stack = 1ull << 22;
};

/// Whether a pickle may name this global.
using AllowFn = bool (*)(std::string_view module, std::string_view name);

/// `what` names the input in errors.
Result<Pickle> read_pickle(std::string_view bytes, AllowFn allow, const std::string& what,
                           const PickleLimits& limits = {});

}  // namespace lowbit::ckpt
