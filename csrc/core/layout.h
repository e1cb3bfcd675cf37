// How a parameter is seen: rows = shape[0], cols = the product of the rest. Blocks and tiles lie
// inside a row and are counted from the row's first global column, so they are the same whoever
// holds the row.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

constexpr int kTile =
    256;  // values that the leaves work on at a time; a multiple of every block length
constexpr int kMaxSlots = 4;  // state tensors of one update rule

LB_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
LB_HD constexpr int64_t code_bytes(int64_t values, int bits) { return ceil_div(values * bits, 8); }

}  // namespace lowbit
