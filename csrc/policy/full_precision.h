// Which parameters keep full-precision state.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace lowbit {

/// Whether a parameter of this global shape is too small for quantized state: too few dimensions,
/// rows that are too short, or fewer than `min_numel` elements (nullopt: the policy's number).
bool is_full_precision(const std::vector<int64_t>& shape,
                       std::optional<int64_t> min_numel = std::nullopt);

}  // namespace lowbit
