// A step on either processor.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/plan.h"

namespace lowbit {

/// What a call of `step` takes but its tensors and their plan.
struct StepCall {
  Tensors workspace;
  std::vector<double> hyper;
  MaybeTensor lr, grad_scale, found_inf;
  bool maximize = false;
  int64_t seed = 0, phase = 0;
};

/// One phase of a step, on the device of the plan.
///
/// jobs: the plan's, for this call to change.
void run_step(const Plan& plan, std::vector<Job>& jobs, StepCall call);

void step_cpu(const Plan& plan, std::vector<Job>& jobs, StepCall& call);
void step_cuda(const Plan& plan, const std::vector<Job>& jobs, StepCall& call);

/// The one number in a CPU tensor.
double number(const Tensor& t, const char* what);

}  // namespace lowbit
