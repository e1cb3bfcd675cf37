// Which parameters keep full-precision state.
#pragma once

#include <cstdint>
#include <vector>

#include "policy/thresholds.h"

namespace lowbit {

/// Whether a parameter of this global shape is too small for quantized state: too few dimensions,
/// rows that are too short, or fewer than `min_numel` elements.
bool is_full_precision(const std::vector<int64_t>& shape, int64_t min_numel = kMinNumel);

}  // namespace lowbit
