// The pickle parser. It checks opcodes and globals against an allowlist and executes nothing. A
// call must fit the schema of its global, every length is checked before memory is allocated, and
// all sizes are limited.
#pragma once

#include <span>
#include <string>

#include "io/status.h"
#include "pickle/value.h"

namespace lowbit::ckpt {

struct PickleLimits {
  uint64_t bytes = 1ull << 30;
  uint64_t nodes = 1ull << 26;
  uint64_t bytes_per_node = 0;  // unless 0: a large pickle may have a node for each so many bytes
  uint64_t stack = 1ull << 22;
};

/// The globals that a pickle may name. It must outlive the Pickle.
struct Allowlist {
  std::span<const GlobalRule> globals;
  bool persistent = false;  // whether persistent ids, which name storages, are allowed
  bool opaque = false;      // whether objects of other classes are named, unread (pickle/opaque.h)
};

/// Parses all of `bytes`. `what` names the input in errors.
Result<Pickle> read_pickle(std::string bytes, const Allowlist& allowed, const std::string& what,
                           const PickleLimits& limits = {});

}  // namespace lowbit::ckpt
