// The passes over a job on the CPU. Each takes a range of its parts, in any order and on any
// thread; the parts of one pass write nothing that another part of it reads.
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

/// What LOWBIT_ISA named in vain; null where it is not set or was taken.
const char* refused_isa();

/// Makes the tiles of a job that `step` is next to walk as long as serves the CPU best: longer ones
/// do not stay in the nearest cache, and each costs as much as some tens of values. Rows that lie one
/// behind the other, in memory and in the parameter, and hold whole blocks become one row.
void lengthen_tiles(Job& job);
constexpr int kLongTile = 512;

/// Asks memory for the first values of the job that `step` will read: gradient, parameter, codes.
void fetch_first_tile(const Job& job);

/// Steps the tiles [begin, end) of the job, counted row by row.
void step(const Job& job, int64_t begin, int64_t end, const Leaves& leaf);

/// After the step: the scales of all blocks of cut rows, also of those that are elsewhere.
void write_cut_scales(const Job& job, const Leaves& leaf);

/// Parts of the passes that measure: tiles, or what may be shared by nobody else.
int64_t measure_parts(const Job& job, int round);
int64_t scale_parts(const Job& job);
/// Adds what the elements of the parts [begin, end) contribute to the sums of a round of the rule.
void measure(const Job& job, int round, int64_t begin, int64_t end, const Leaves& leaf);
/// Raises the maxima of measured scales to those of the updated state.
void measure_scales(const Job& job, int64_t begin, int64_t end, const Leaves& leaf);

}  // namespace lowbit::cpu
