// The factors of a job's rule: before the step, and from what its rounds measured.
#pragma once

#include <cstdint>

#include "core/job.h"

namespace lowbit {

/// Fills job.coef with the rule's factors for step t (from 1), computed in double.
void prepare(Job& job, const double* hyper, int64_t step, double g_scale);

/// After round `round`: takes what the reduced sums make of it into job.coef; `keep` also writes
/// the tensor's numbers.
void finalize(Job& job, int round, bool keep);
/// Moves row and column means of the round's factored moment to the new ones, for inner rows and
/// column sums of the whole job.
void finalize_factor(const Job& job, int round);

}  // namespace lowbit
