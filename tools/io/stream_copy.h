// Copies of memory that go past the caches.
#pragma once

#include <cstdint>
#include <vector>

#include "io/status.h"

namespace lowbit::ckpt {

struct MemoryCopy {
  char* to;
  const char* from;
  uint64_t bytes;
};

/// A plain copy reads what it overwrites into the caches first, so it
/// moves three bytes for each that it copies; on x86-64 this one moves two. Worth it where the
/// copies are larger than the caches. They must not overlap.
void stream_copy(const MemoryCopy& copy);
/// Many of them, on `threads` threads.
Status stream_copy(const std::vector<MemoryCopy>& copies, int threads);

}  // namespace lowbit::ckpt
