// The operator `step` and the workspace it asks for, on the processor where the parameters are.
#include "ops/step.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cuda/tables.h"

namespace lowbit {

using torch::headeronly::ScalarType;

double number(const Tensor& t, const char* what) {
  STD_TORCH_CHECK(t.is_cpu() && t.numel() == 1, "lowbit::step: ", what,
                  " must be a CPU tensor of one element here");
  if (t.scalar_type() == ScalarType::Double) return *t.const_data_ptr<double>();
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, "lowbit::step: ", what,
                  " must be float32 or float64");
  return *t.const_data_ptr<float>();
}

namespace {

/// Gives the jobs their random bits and their workspace; returns the sizes that they need of it.
WorkspaceSizes bind_jobs(const Plan& plan, std::vector<Job>& jobs, const StepCall& call) {
  const RuleInfo rule = rule_info(plan.rule);
  const Workspace workspace = checked_workspace(call.workspace);
  WorkspaceSizes sizes{};
  for (size_t i = 0; i < jobs.size(); ++i) {
    Job& job = jobs[i];
    job.random = random_key(static_cast<uint64_t>(call.seed), 0, job.random.stream);
    const SlotState* states = &plan.states[i * kMaxSlots];
    const bool combines =
        std::any_of(states, states + kMaxSlots, [](const SlotState& s) { return s.combines(); });
    place(job, rule, combines, workspace, sizes);
  }
  return sizes;
}

void check_call(const Plan& plan, const WorkspaceSizes& sizes, const StepCall& call) {
  check_sizes(call.workspace, sizes, plan.device);
  STD_TORCH_CHECK(call.phase >= 0 && call.phase <= plan.phases, "lowbit::step: there is no phase ",
                  call.phase, " of ", rule_info(plan.rule).name);
}

}  // namespace

void run_step(const Plan& plan, std::vector<Job>& jobs, StepCall call) {
  check_hyper(rule_info(plan.rule), call.hyper);
  check_call(plan, bind_jobs(plan, jobs, call), call);
  if (plan.device.cpu) {
    step_cpu(plan, jobs, call, false);
  } else {
    step_cuda(plan, jobs, call, nullptr);
  }
}

RepeatedStep::RepeatedStep() : tables_(std::make_unique<cuda::Tables>()) {}
RepeatedStep::~RepeatedStep() = default;

void RepeatedStep::run(Plan& plan, StepCall call) {
  if (plan.device.cpu && plan.phases > 0) {  // what is measured is computed in the jobs
    jobs_ = plan.jobs;
    run_step(plan, jobs_, std::move(call));
    return;
  }
  check_hyper(rule_info(plan.rule), call.hyper);
  std::vector<const void*> workspace;
  for (const Tensor& t : call.workspace) workspace.push_back(t.const_data_ptr());
  if (plan.moved || jobs_.empty() || call.seed != seed_ || workspace != workspace_) {
    tables_->clear();
    jobs_ = plan.jobs;
    sizes_ = bind_jobs(plan, jobs_, call);
    if (plan.device.cpu) lengthen_tiles(jobs_);
    seed_ = call.seed, workspace_ = std::move(workspace);
    plan.moved = false;
  }
  check_call(plan, sizes_, call);
  // Gradients move with each backward pass, and a table that is written again is made of the jobs.
  for (size_t i = 0; i < jobs_.size(); ++i) jobs_[i].grad = plan.grads[i];
  if (plan.device.cpu) {
    step_cpu(plan, jobs_, call, true);
  } else {
    step_cuda(plan, jobs_, call, tables_.get());
  }
}

namespace {

void step(int64_t rule, Tensors params, Tensors grads, Tensors state, Tensors steps,
          Tensors workspace, Tensor plan, std::vector<double> hyper, MaybeTensor lr,
          MaybeTensor grad_scale, MaybeTensor found_inf, bool maximize, int64_t seed,
          int64_t phase) {
  check_hyper(rule_info(checked_rule("lowbit::step", rule)), hyper);
  if (params.empty()) return;
  Plan made =
      make_plan({.rule = rule, .params = params, .state = state, .steps = steps, .plan = plan});
  bind_tensors(made, params, grads);
  run_step(made, made.jobs,
           {.workspace = std::move(workspace),
            .hyper = std::move(hyper),
            .lr = std::move(lr),
            .grad_scale = std::move(grad_scale),
            .found_inf = std::move(found_inf),
            .maximize = maximize,
            .seed = seed,
            .phase = phase});
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit, m) {
  m.def(
      "step(int rule, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state, Tensor(c!)[] steps, "
      "Tensor(d!)[] workspace, Tensor plan, float[] hyper, *, "
      "Tensor? lr=None, Tensor? grad_scale=None, Tensor? found_inf=None, bool maximize=False, int "
      "seed=0, int phase=0) -> ()");
  m.def("workspace_sizes(int rule, Tensor plan) -> int[]");
  m.def("workspace_regions(int rule, Tensor plan, int phase) -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, m) { m.impl("step", LOWBIT_OPERATOR(step)); }

STABLE_TORCH_LIBRARY_IMPL(lowbit, CUDA, m) { m.impl("step", LOWBIT_OPERATOR(step)); }

STABLE_TORCH_LIBRARY_IMPL(lowbit, CompositeExplicitAutograd, m) {
  m.impl("workspace_sizes", LOWBIT_OPERATOR(workspace_sizes));
  m.impl("workspace_regions", LOWBIT_OPERATOR(workspace_regions));
}
