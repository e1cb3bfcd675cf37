// The passes over a job on the CPU. Each takes a range of the job's parts, in any order and on any
// thread. A part of a pass never writes what another part of the same pass reads.
#pragma once

#include <cstdint>

#include "core/job.h"
#include "cpu/kernels.h"

namespace lowbit::cpu {

/// The kernels in use: the best that this processor runs, or the forced ones.
const Kernels& kernels();
/// The instruction sets that this processor runs, best last, separated by spaces.
const char* usable_isas();
/// Forces one of them. Returns false if it does not exist or this processor does not run it.
bool set_isa(const char* name);

/// The value of LOWBIT_ISA if it was rejected, or null.
const char* refused_isa();

/// Sets the length of the tiles that `step` walks to the best for the CPU. Longer tiles do not stay
/// in the first-level cache, and each tile costs as much as a few tens of values. Rows that are
/// adjacent, in memory and in the parameter, and have whole blocks become one row.
void lengthen_tiles(Job& job);
constexpr int kLongTile = 512;

/// Prefetches the first values of the job that `step` will read: gradient, parameter, codes.
void fetch_first_tile(const Job& job);

/// Steps the tiles [begin, end) of the job, counted row by row.
void step(const Job& job, int64_t begin, int64_t end, const Kernels& kernel);

/// After the step, writes the scales of all blocks of cut rows, including blocks on other ranks.
void write_cut_scales(const Job& job, const Kernels& kernel);

/// The number of parts of the measuring passes: tiles, or groups of tiles that share sums.
int64_t measure_parts(const Job& job, int round);
int64_t scale_parts(const Job& job);
/// Adds the contributions of the parts [begin, end) to the sums of a round of the rule.
void measure(const Job& job, int round, int64_t begin, int64_t end, const Kernels& kernel);
/// Raises the maxima of cross-tile scales to those of the updated state.
void measure_scales(const Job& job, int64_t begin, int64_t end, const Kernels& kernel);

}  // namespace lowbit::cpu
