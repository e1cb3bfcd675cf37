// The concatenation of sources.
#pragma once

#include <memory>
#include <vector>

#include "container/document/document.h"

namespace lowbit::ckpt {

/// A run of elements: [first, first + count) of a source.
struct Run {
  std::shared_ptr<Source> source;
  uint64_t count;
  uint64_t first = 0;
};
/// Runs of elements of `width` bytes, concatenated.
std::shared_ptr<Source> joined(std::vector<Run> runs, int width);

}  // namespace lowbit::ckpt
