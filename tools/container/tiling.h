// Whether boxes tile a shape: inside it, disjoint, and nothing left out. torch never asks when it
// loads, and leaves what was in memory where a part is missing.
#pragma once

#include "container/manifest.h"

namespace lowbit::ckpt {

Status check_tiling(const Tensor& tensor);

}  // namespace lowbit::ckpt
