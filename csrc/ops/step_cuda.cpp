// A step on a GPU: checked here, done by the CUDA library.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "cuda/tables.h"
#include "ops/step.h"
#include "policy/workspace.h"

namespace lowbit {
namespace {

using torch::headeronly::ScalarType;

/// The cross-tile scales of all jobs, as the CUDA library takes them.
std::vector<CudaScale> cuda_scales(const Plan& plan, const std::vector<Job>& jobs) {
  static_assert(CudaScale::kMaxDims >= PlanRow::kMaxDims);
  const int slots = rule_info(plan.rule).slots;
  std::vector<CudaScale> all;
  if (!plan.has_cross_tile_scales) return all;
  for (size_t i = 0; i < jobs.size(); ++i) {
    for (int k = 0; k < slots; ++k) {
      const StateSlot& slot = jobs[i].state[k];
      if (!is_cross_tile(slot.kind)) continue;
      const SlotState& state = plan.states[i * kMaxSlots + static_cast<size_t>(k)];
      CudaScale scale{};
      std::copy(state.absmax.begin(), state.absmax.end(), scale.absmax);
      scale.count = static_cast<int>(state.dims.size());
      std::copy(state.dims.begin(), state.dims.end(), scale.dims);
      if (state.combines()) scale.col_absmax = const_cast<uint32_t*>(slot.col_absmax);
      scale.row_next = slot.row_next, scale.col_next = slot.col_next;
      scale.rows = slot.kind == kTensor ? 1 : jobs[i].rows;
      scale.cols = jobs[i].cols;
      all.push_back(scale);
    }
  }
  return all;
}

}  // namespace

void step_cuda(const Plan& plan, const std::vector<Job>& jobs, StepCall& call,
               cuda::Tables* tables) {
  const char* op = "lowbit::step";
  MaybeTensor& lr = call.lr;
  if (lr && lr->is_cpu()) {
    call.hyper[0] = number(*lr, "lr");
    lr.reset();
  }
  const float* const lr_there = one_float(lr, op, "lr", plan.device);
  const float* const grad_scale = one_float(call.grad_scale, op, "grad_scale", plan.device);
  const float* const found_inf = one_float(call.found_inf, op, "found_inf", plan.device);
  const cuda::Library& library = cuda::library();
  STD_TORCH_CHECK(library.error == nullptr, op, " on CUDA: ", library.error);
  const std::vector<CudaScale> scales = cuda_scales(plan, jobs);
  const int32_t device = plan.device.index;
  const auto count = static_cast<int64_t>(jobs.size());
  torch::stable::accelerator::DeviceGuard guard(device);
  CudaStep step{.device = device,
                .stream = library.current_stream(device),
                .jobs = jobs.data(),
                .count = count,
                .phase = static_cast<int>(call.phase),
                .phases = plan.phases,
                .steps = plan.steps.data(),
                .grads = plan.grads.data(),
                .hyper = call.hyper.data(),
                .hypers = static_cast<int>(call.hyper.size()),
                .lr = lr_there,
                .grad_scale = grad_scale,
                .found_inf = found_inf,
                .maximize = call.maximize,
                .scales = scales.data(),
                .scale_count = static_cast<int64_t>(scales.size()),
                .sums = {},
                .sums_bytes = {},
                .plan = nullptr,
                .workspace = nullptr,
                .writes = true};
  for (size_t i = 0; i < 2 && !call.workspace.empty(); ++i) {
    const Tensor& sums = call.workspace[i == 0 ? kRowSums : kColSums];
    step.sums[i] = sums.mutable_data_ptr();
    step.sums_bytes[i] = sums.numel() * static_cast<int64_t>(sizeof(int64_t));
  }
  const char* error = call.phase == 0 ? library.prefetch(device, step.stream) : nullptr;
  const auto allocate = [&](int64_t bytes) {
    const int64_t size[] = {bytes};
    auto table = std::make_shared<Tensor>(
        torch::stable::empty(size, ScalarType::Byte, std::nullopt,
                             torch::stable::Device(torch::headeronly::DeviceType::CUDA, device)));
    return cuda::TableMemory{table->data_ptr(), table};
  };
  if (error == nullptr) {
    error = tables != nullptr ? tables->step(library, step, allocate)
                              : cuda::Tables::step_once(library, step, allocate);
  }
  STD_TORCH_CHECK(error == nullptr, op, " on CUDA: ", error);
}

}  // namespace lowbit
