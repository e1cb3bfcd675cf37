// Sources that are one behind the other.
#pragma once

#include <memory>
#include <vector>

#include "container/document.h"

namespace lowbit::ckpt {

/// Elements [first, first + count) of a source.
struct Run {
  std::shared_ptr<Source> source;
  uint64_t count;
  uint64_t first = 0;
};
/// Runs of elements of `width` bytes, one behind the other.
std::shared_ptr<Source> joined(std::vector<Run> runs, int width);

}  // namespace lowbit::ckpt
