// Reads a pickle into inert values. Opcodes and globals are an allowlist, a call must fit its
// global's schema, every length is checked against what is left before anything is allocated, and
// everything has a limit.
#pragma once

#include <span>
#include <string>

#include "io/status.h"
#include "pickle/value.h"

namespace lowbit::ckpt {

struct PickleLimits {
  uint64_t bytes = 1ull << 30;
  uint64_t nodes = 1ull << 26;
  uint64_t stack = 1ull << 22;
};

/// What a pickle may name. It must outlive the Pickle.
struct Allowlist {
  std::span<const GlobalRule> globals;
  bool persistent = false;  // storages by persistent id
};

/// `what` names the input in errors.
Result<Pickle> read_pickle(std::string bytes, const Allowlist& allowed, const std::string& what,
                           const PickleLimits& limits = {});

}  // namespace lowbit::ckpt
