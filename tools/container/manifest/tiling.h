// Checks that chunks tile a tensor: inside its shape, disjoint, none missing. torch does not check
// this when it loads: where a chunk is missing, memory keeps its old content.
#pragma once

#include "container/manifest/manifest.h"

namespace lowbit::ckpt {

/// An error if the chunks of the tensor do not tile its shape.
Status check_tiling(const Tensor& tensor);

}  // namespace lowbit::ckpt
