// Adding the gradient of a micro-batch to what is held of those before it.
//
//   held' = store(load(held) + scale * g)
//
// in float32, one rounding for the product and one for the sum; load and store are those of a
// parameter format (core/param), so a buffer in bfloat16 is rounded to the nearest, stochastically,
// or with its Kahan compensation beside it. The random bits of a gradient are those of
// core/random.h with `step` the number of additions so far and a slot that no parameter or state
// draws from.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

/// In the highest byte of a group's number; a step draws from 0 (the parameter) up (its state).
constexpr uint64_t kAccumulateSlot = uint64_t{128} << 56;

LB_HD float accumulated(float held, float g, float scale) { return held + scale * g; }

}  // namespace lowbit
