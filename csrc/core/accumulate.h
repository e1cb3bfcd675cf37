// The sum of the gradients of several micro-batches, one addition at a time.
//
//   sum' = store(load(sum) + scale * g)
//
// in float32, with one rounding for the product and one for the sum. `load` and `store` are those
// of a parameter format (core/param): a bfloat16 buffer rounds to nearest, rounds stochastically,
// or carries its Kahan compensation. Random bits come from core/random.h, with `step` the number of
// additions so far and a slot that neither parameters nor state use.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

/// The highest byte of a group number. A step uses 0 for the parameter and 1 and up for its state.
constexpr uint64_t kAccumulateSlot = uint64_t{128} << 56;

LB_HD float accumulated(float held, float g, float scale) { return held + scale * g; }

}  // namespace lowbit
