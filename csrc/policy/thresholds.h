// From which size on a parameter's state is quantized. Only this room includes it: others ask
// policy/full_precision.h, Python reads the catalog.
#pragma once

#include <cstdint>

namespace lowbit {

inline constexpr int64_t kMinDims = 2;      // vectors keep full-precision state
inline constexpr int64_t kMinNumel = 4096;  // elements; `min_numel` takes its place
inline constexpr int64_t kMinCols = 16;     // elements of a row, all dimensions but the first

}  // namespace lowbit
