// Copies between strided arrays, and between boxes of tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "container/manifest/box.h"

namespace lowbit::ckpt {

/// One dimension of a copy: its elements, and the strides of both sides in elements.
struct Step {
  uint64_t count, from, to;
};

/// Drops dimensions of one element, and merges those that are contiguous on both sides.
std::vector<Step> joined(const std::vector<Step>& steps);
/// Copies elements of `width` bytes (1, 2, 4, 8 or 16), `steps` outermost first.
void copy_strided(const char* from, char* to, const std::vector<Step>& steps, uint64_t width);
/// The intersection of two boxes; a size is 0 if they do not overlap.
Box common_box(const Box& a, const Box& b);
/// Copies the box `wanted` of the box `held` from `from` to `to`, both row-major.
void copy_box(const char* from, const Box& held, const Box& wanted, char* to, uint64_t width);

}  // namespace lowbit::ckpt
