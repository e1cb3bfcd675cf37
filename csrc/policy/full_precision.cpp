#include "policy/full_precision.h"

#include <functional>
#include <numeric>

#include "policy/thresholds.h"

namespace lowbit {

bool is_full_precision(const std::vector<int64_t>& shape, std::optional<int64_t> min_numel) {
  if (static_cast<int64_t>(shape.size()) < kMinDims) return true;
  const int64_t cols =
      std::accumulate(shape.begin() + 1, shape.end(), int64_t{1}, std::multiplies<>());
  return shape[0] * cols < min_numel.value_or(kMinNumel) || cols < kMinCols;
}

}  // namespace lowbit
