// Counting what is wrong with the numbers of a tensor, by their bits alone.
#pragma once

#include <cstdint>

#include "container/manifest/dtype.h"

namespace lowbit::ckpt {

struct ValueStats {
  uint64_t count = 0;  // elements seen
  uint64_t nan = 0, infinite = 0, negative = 0;
  uint64_t odd = 0;             // bytes of bool that are neither 0 nor 1
  uint64_t first = UINT64_MAX;  // index of the first that is NaN or infinite
  uint64_t first_negative = UINT64_MAX;
};

/// Whether the dtype has numbers that are not finite, or a sign: false for integers.
bool has_floats(const Dtype& dtype);
/// Adds `count` elements, the first of which has the index `first`.
void take(const Dtype& dtype, const void* values, uint64_t first, uint64_t count,
          ValueStats& value_stats);

}  // namespace lowbit::ckpt
