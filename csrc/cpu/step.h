// The walk on the CPU: tiles of a job, in any order and on any thread.
#pragma once

#include <cstdint>

#include "cpu/leaves.h"
#include "job.h"

namespace lowbit::cpu {

/// The leaves in use: the best that this processor runs, or what was forced.
const Leaves& leaves();
/// The instruction sets that this processor runs, best last, separated by spaces.
const char* usable_isas();
/// Force one of them; false where this processor does not run it or it does not exist.
bool set_isa(const char* name);

/// Steps the tiles [begin, end) of the job, counted row by row.
void step(const Job& job, int64_t begin, int64_t end, const Leaves& leaf);

}  // namespace lowbit::cpu
