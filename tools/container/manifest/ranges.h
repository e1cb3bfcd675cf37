// A range of a tensor's row-major order as boxes, which is what a manifest's chunks are.
#pragma once

#include <cstdint>
#include <vector>

#include "container/manifest/box.h"

namespace lowbit::ckpt {

/// The boxes that elements [begin, end) of a tensor of this shape fill, in that order: at most
/// 2 * dimensions - 1 of them, each without a gap in the range. None where the range is empty.
std::vector<Box> boxes_of_range(const Shape& shape, uint64_t begin, uint64_t end);

}  // namespace lowbit::ckpt
