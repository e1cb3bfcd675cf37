// A step on a GPU: checked here, done by the CUDA library.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <vector>

#include "cuda/library.h"
#include "ops_step.h"

namespace lowbit {
namespace {

using torch::headeronly::ScalarType;

/// The measured scales of all jobs, as the CUDA library takes them.
std::vector<CudaScale> cuda_scales(const Plan& plan, const Tensor& rows, int slots) {
  static_assert(CudaScale::kMostDims >= kMostDims);
  std::vector<CudaScale> all;
  const int64_t* row = rows.const_data_ptr<int64_t>();
  for (size_t i = 0; i < plan.jobs.size(); ++i, row += kPlanColumns) {
    for (int k = 0; k < slots; ++k) {
      const StateSlot& slot = plan.jobs[i].state[k];
      if (!is_measured(slot.kind)) continue;
      const std::vector<float*>& most = plan.states[i * kMaxSlots + static_cast<size_t>(k)].most;
      CudaScale scale{};
      std::copy(most.begin(), most.end(), scale.most);
      if (slot.kind == kRank1) {
        scale.count = static_cast<int>(row[kDims]);
        std::copy_n(row + kDims + 1, scale.count, scale.dims);
        if (combines(row)) scale.col_most = const_cast<uint32_t*>(slot.col_most);
      }
      scale.row_next = slot.row_next, scale.col_next = slot.col_next;
      scale.rows = slot.kind == kTensor ? 1 : plan.jobs[i].rows;
      scale.cols = plan.jobs[i].cols;
      all.push_back(scale);
    }
  }
  return all;
}

}  // namespace

void step_cuda(StepArgs args) {
  auto& [name, params, grads, state, steps, scratch, plan, hyper, lr, grad_scale, found_inf,
         maximize, seed, phase] = args;
  Plan made = make_plan(args);
  std::vector<Job>& jobs = made.jobs;
  const RuleInfo info = rule_info(made.rule);
  const Device device(params[0]);
  const char* op = "lowbit::step";
  CudaStep call{};
  if (lr && lr->is_cpu()) {
    hyper[0] = number(*lr, "lr");
    lr.reset();
  }
  call.lr = one_float(lr, op, "lr", device);
  call.grad_scale = one_float(grad_scale, op, "grad_scale", device);
  call.found_inf = one_float(found_inf, op, "found_inf", device);
  std::vector<float*> step_pointers(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    STD_TORCH_CHECK(device.has(steps[i]), op, ": the step of parameter ", i, " is on ",
                    Device(steps[i]).name(), " and the parameter is on ", device.name());
    step_pointers[i] = static_cast<float*>(steps[i].mutable_data_ptr());
  }
  const cuda::Library& library = cuda::library();
  STD_TORCH_CHECK(library.error == nullptr, op, " on CUDA: ", library.error);
  const std::vector<CudaScale> scales = cuda_scales(made, plan, info.slots);
  call.device = device.index;
  torch::stable::accelerator::DeviceGuard guard(call.device);
  const Tensor workspace = torch::stable::new_empty(
      params[0], {library.workspace(jobs.data(), static_cast<int64_t>(jobs.size()))},
      ScalarType::Byte);
  call.stream = library.current_stream(call.device);
  call.jobs = jobs.data();
  call.count = static_cast<int64_t>(jobs.size());
  call.phase = static_cast<int>(phase);
  call.phases = made.phases;
  call.steps = step_pointers.data();
  call.hyper = hyper.data();
  call.hypers = static_cast<int>(hyper.size());
  call.maximize = maximize;
  call.scales = scales.data();
  call.scale_count = static_cast<int64_t>(scales.size());
  for (int i = 0; i < 2 && !scratch.empty(); ++i) {
    const Tensor& sums = scratch[static_cast<size_t>(i) + 1];
    call.sums[i] = sums.mutable_data_ptr();
    call.sums_bytes[i] = sums.numel() * static_cast<int64_t>(sizeof(int64_t));
  }
  call.workspace = workspace.data_ptr();
  const char* error = phase == 0 ? library.prefetch(call.device, call.stream) : nullptr;
  if (error == nullptr) error = library.step(&call);
  STD_TORCH_CHECK(error == nullptr, op, " on CUDA: ", error);
}

}  // namespace lowbit
