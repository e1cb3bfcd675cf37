// A step on either processor.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/plan.h"
#include "ops/workspace.h"

namespace lowbit {
namespace cuda {
class Tables;
}

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

/// The jobs of steps over the same tensors, with what a call gives them. They stay until something
/// but a gradient is elsewhere, as their table on a GPU does; not on the CPU if anything is
/// measured.
class RepeatedStep {
 public:
  RepeatedStep();
  ~RepeatedStep();
  void run(Plan& plan, StepCall call);

 private:
  std::vector<Job> jobs_;
  std::unique_ptr<cuda::Tables> tables_;
  // What the jobs were made with.
  int64_t seed_ = 0;
  std::vector<const void*> workspace_;
  WorkspaceSizes sizes_{};
};

/// long_tiles: whether the jobs have them (lengthen_tiles) from the step before.
void step_cpu(const Plan& plan, std::vector<Job>& jobs, StepCall& call, bool long_tiles);
/// The tiles that the update on the CPU walks.
void lengthen_tiles(std::vector<Job>& jobs);
/// tables: what steps over the same tensors leave on the device, or null.
void step_cuda(const Plan& plan, const std::vector<Job>& jobs, StepCall& call,
               cuda::Tables* tables);

/// The one number in a CPU tensor.
double number(const Tensor& t, const char* what);

}  // namespace lowbit
