// A step on either processor.
#pragma once

#include "ops_plan.h"

namespace lowbit {

void step_cpu(StepArgs args);
void step_cuda(StepArgs args);

/// The one number in a CPU tensor.
double number(const Tensor& t, const char* what);

}  // namespace lowbit
