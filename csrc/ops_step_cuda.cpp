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
  const cuda::Library& library = cuda::library();
  STD_TORCH_CHECK(library.error == nullptr, "lowbit::step on CUDA: ", library.error);
  CudaStep call{};
  if (lr && lr->is_cpu()) {
    hyper[0] = number(*lr, "lr");
    lr.reset();
  }
  const auto device_float = [](const MaybeTensor& t, const char* what) -> const float* {
    if (!t) return nullptr;
    STD_TORCH_CHECK(t->is_cuda() && t->numel() == 1 && t->scalar_type() == ScalarType::Float,
                    "lowbit::step: ", what, " must be one float32 on the parameters' device");
    return t->const_data_ptr<float>();
  };
  std::vector<float*> step_pointers(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    STD_TORCH_CHECK(steps[i].is_cuda(), "lowbit::step: the step of parameter ", i,
                    " must be on the parameter's device");
    step_pointers[i] = static_cast<float*>(steps[i].mutable_data_ptr());
  }
  const std::vector<CudaScale> scales = cuda_scales(made, plan, info.slots);
  call.device = params[0].get_device_index();
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
  call.lr = device_float(lr, "lr");
  call.grad_scale = device_float(grad_scale, "grad_scale");
  call.found_inf = device_float(found_inf, "found_inf");
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
  STD_TORCH_CHECK(error == nullptr, "lowbit::step on CUDA: ", error);
}

}  // namespace lowbit
