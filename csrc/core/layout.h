// The two-dimensional view of a parameter: rows = shape[0], cols = the product of the other
// dimensions. Blocks and tiles lie inside a row and start at its first global column, so they do
// not depend on which rank has the row.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

constexpr int kTile = 256;                       // values per tile
constexpr int kMinBlock = 32, kMaxBlock = 2048;  // powers of two between these bounds
constexpr int kMaxTile = kMaxBlock;  // a tile has whole blocks, so long blocks make it longer
constexpr int kMaxSlots = 4;         // state tensors of one update rule
constexpr int kMaxFactors = 2;       // factored second moments of one update rule
constexpr int kMaxTotals = 2;        // sums over a whole tensor in one round
constexpr int kGridTotal = 1;        // index of the total that sums over a round's grid
constexpr int kMaxNumbers = 2;       // numbers per tensor that a rule keeps

LB_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
LB_HD constexpr int64_t code_bytes(int64_t values, int bits) { return ceil_div(values * bits, 8); }

}  // namespace lowbit
