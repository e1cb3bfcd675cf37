// Copies between arrays of any strides: boxes of tensors into boxes of tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "container/box.h"

namespace lowbit::ckpt {

/// One dimension that is walked: elements, and the strides of both sides in elements.
struct Step {
  uint64_t count, from, to;
};

/// Leaves out dimensions of one element, and joins those that are one run on both sides.
std::vector<Step> joined(const std::vector<Step>& steps);
/// Copies elements of `width` bytes (1, 2, 4, 8 or 16), `steps` outermost first.
void copy_strided(const char* from, char* to, const std::vector<Step>& steps, uint64_t width);
/// What two boxes share; some size is 0 where that is nothing.
Box common_box(const Box& a, const Box& b);
/// Takes the box `wanted` out of `held`, which lies row-major in `from`, into `to`, row-major.
void copy_box(const char* from, const Box& held, const Box& wanted, char* to, uint64_t width);

}  // namespace lowbit::ckpt
