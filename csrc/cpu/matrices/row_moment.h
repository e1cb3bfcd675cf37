// NorMuon's rows (core/muon/row_moment.h).
#pragma once

#include <cstdint>

#include "cpu/matrices/subspace.h"

namespace lowbit::cpu {

/// Evens out the rows of `count` orthogonalized matrices [rows][cols] in place. moments:
/// [count][rows], updated.
void normalize_rows(uint16_t* x, float* moments, int64_t count, int64_t rows, int64_t cols,
                    double beta2, const Parallel& parallel);

}  // namespace lowbit::cpu
