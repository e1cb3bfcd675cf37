// How a parameter is seen: rows = shape[0], cols = the product of the rest. Blocks and tiles lie
// inside a row and are counted from the row's first global column, so they are the same whoever
// holds the row.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace lowbit {

constexpr int kTile = 256;                          // values that the leaves work on at a time
constexpr int kLeastBlock = 32, kMostBlock = 2048;  // powers of two between them
constexpr int kMostTile = kMostBlock;  // a tile holds whole blocks, so long blocks make it longer
constexpr int kMaxSlots = 4;           // state tensors of one update rule
constexpr int kMaxFactors = 2;         // second moments of one update rule that are stored factored
constexpr int kMaxTotals = 2;          // sums over a whole tensor that one round measures
constexpr int kGridTotal = 1;          // the one of them that holds the sum over a round's grid
constexpr int kMaxNumbers = 2;         // numbers that a rule keeps for each tensor

LB_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
LB_HD constexpr int64_t code_bytes(int64_t values, int bits) { return ceil_div(values * bits, 8); }

}  // namespace lowbit
