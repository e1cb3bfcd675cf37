// Means of gradients that do not depend on the order of the addends.
#pragma once

#include <cstdint>

#include "core/job.h"
#include "cpu/kernels.h"

namespace lowbit::cpu {

/// Adds up the elements [begin, end) of a sum, on any thread.
void add_means(const MeanSum& sum, int64_t begin, int64_t end, const Kernels& kernel);

}  // namespace lowbit::cpu
