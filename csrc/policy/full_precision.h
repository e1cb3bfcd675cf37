// Which parameters keep full-precision state.
#pragma once

#include <cstdint>
#include <vector>

namespace lowbit {

/// Whether a parameter of this global shape is too small for quantized state.
bool is_full_precision(const std::vector<int64_t>& shape);

}  // namespace lowbit
