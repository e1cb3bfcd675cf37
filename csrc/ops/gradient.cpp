// Reception of what is done to gradients outside of a step: micro-batches added up, and the exact
// sums that norms are made of (cpu/gradient.h).
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cpu/gradient.h"
#include "cpu/step.h"
#include "cuda/library.h"
#include "ops/ops.h"

namespace lowbit {
namespace {

using torch::headeronly::ScalarType;

// Columns of a plan row; lowbit/gradients/held.py writes them.
enum Column { kRows, kCols, kGlobalCols, kFirst, kStream, kCount, kColumns };

constexpr int64_t kGrain = 32768;  // elements that a thread begins for

int checked_grad(const char* op, const Tensor& grad, size_t i) {
  const int format = grad_format(grad);
  STD_TORCH_CHECK(format >= 0, op, ": gradient ", i, " must be float32, bfloat16 or float16");
  STD_TORCH_CHECK(grad.is_contiguous(), op, ": gradient ", i, " is not contiguous");
  return format;
}

void run_cpu(const std::vector<Accumulation>& jobs) {
  const cpu::Kernels& kernels = cpu::kernels();
  for (const Accumulation& job : jobs) {
    parallel_for(job.tiles(), kGrain / kTile,
                 [&](int64_t begin, int64_t end) { cpu::accumulate(job, begin, end, kernels); });
  }
}

void run_cuda(int device, const std::vector<Accumulation>& jobs) {
  const cuda::Library& library = cuda::library();
  STD_TORCH_CHECK(library.error == nullptr, "lowbit::accumulate on CUDA: ", library.error);
  torch::stable::accelerator::DeviceGuard guard(device);
  const CudaAccumulation call{device, library.current_stream(device), jobs.data(),
                              static_cast<int64_t>(jobs.size())};
  const char* error = library.accumulate(&call);
  STD_TORCH_CHECK(error == nullptr, "lowbit::accumulate on CUDA: ", error);
}

/// buffers += scale * grads. compensation: of each buffer; empty if the format has none.
void accumulate(Tensors buffers, Tensors compensation, Tensors grads, Tensor plan, int64_t number,
                double scale, int64_t seed) {
  const char* op = "lowbit::accumulate";
  const int format = checked_param(op, number);
  const ParamInfo info = param_info(format);
  const size_t n = buffers.size();
  const bool compensated = info.compensation_dtype[0] != 0;
  STD_TORCH_CHECK(grads.size() == n && compensation.size() == (compensated ? n : 0), op, ": ", n,
                  " buffers, ", grads.size(), " gradients, ", compensation.size(),
                  " compensation tensors");
  STD_TORCH_CHECK(plan.scalar_type() == ScalarType::Long && plan.is_cpu() && plan.is_contiguous() &&
                      plan.numel() == static_cast<int64_t>(n) * kColumns,
                  op, ": plan must be an int64 CPU tensor [", n, ", ", static_cast<int>(kColumns),
                  "]");
  const int64_t* row = plan.const_data_ptr<int64_t>();
  std::map<int, std::vector<Accumulation>> jobs;  // by device; the CPU is -1
  std::vector<std::pair<uintptr_t, uintptr_t>> extents;
  for (size_t i = 0; i < n; ++i, row += kColumns) {
    Accumulation job{};
    job.rows = row[kRows], job.cols = row[kCols], job.global_cols = row[kGlobalCols];
    job.first = row[kFirst];
    int64_t numel = 0;
    STD_TORCH_CHECK(job.rows >= 0 && job.cols >= 0 && job.first >= 0 &&
                        job.global_cols >= job.cols &&
                        !__builtin_mul_overflow(job.rows, job.cols, &numel),
                    op, ": the plan of buffer ", i, " has a negative or impossible size");
    job.grad_format = checked_grad(op, grads[i], i);
    STD_TORCH_CHECK(buffers[i].scalar_type() == scalar_type(info.dtype) &&
                        buffers[i].is_contiguous() && buffers[i].numel() == numel &&
                        grads[i].numel() == numel,
                    op, ": buffer ", i, " must be a contiguous tensor of ", info.dtype, " with ",
                    numel, " elements, as its gradient has");
    const Device device(buffers[i]);
    STD_TORCH_CHECK(device.has(grads[i]), op, ": buffer ", i, " is on ", device.name(),
                    " and its gradient on ", Device(grads[i]).name());
    STD_TORCH_CHECK(
        !compensated || (compensation[i].scalar_type() == scalar_type(info.compensation_dtype) &&
                         compensation[i].is_contiguous() && device.has(compensation[i]) &&
                         compensation[i].numel() == numel * compensation_width(info)),
        op, ": '", info.name, "' wants a contiguous ", info.compensation_dtype,
        " compensation of buffer ", i, ", on its device");
    job.held = buffers[i].mutable_data_ptr();
    job.compensation = compensated ? compensation[i].mutable_data_ptr() : nullptr;
    job.grad = grads[i].const_data_ptr();
    job.format = format;
    job.scale = static_cast<float>(scale);
    job.random = random_key(static_cast<uint64_t>(seed), static_cast<uint32_t>(row[kCount]),
                            static_cast<uint32_t>(row[kStream]));
    const auto begin = reinterpret_cast<uintptr_t>(job.held);
    if (numel > 0) extents.push_back({begin, begin + static_cast<uintptr_t>(numel * info.bytes)});
    jobs[device.cpu ? -1 : device.index].push_back(job);
  }
  // A GPU adds to all buffers at the same time.
  std::sort(extents.begin(), extents.end());
  for (size_t i = 0; i + 1 < extents.size(); ++i)
    STD_TORCH_CHECK(extents[i].second <= extents[i + 1].first, op,
                    ": two buffers overlap; add to them in calls of their own");
  for (const auto& [device, on_device] : jobs)
    device < 0 ? run_cpu(on_device) : run_cuda(device, on_device);
}

/// Words of the sum of |g| (power 1) or of g * g (power 2) over all of them.
Tensor exact_powers(Tensors grads, int64_t power) {
  const char* op = "lowbit::exact_powers";
  STD_TORCH_CHECK(!grads.empty() && (power == 1 || power == 2), op,
                  ": takes gradients, and the power 1 or 2");
  const int64_t sizes[] = {cpu::kSumWords};
  Tensor made = torch::stable::new_empty(grads[0], sizes, ScalarType::Long);
  auto* words = static_cast<int64_t*>(made.mutable_data_ptr());
  std::fill_n(words, cpu::kSumWords, 0);
  const cpu::Kernels& kernels = cpu::kernels();
  std::mutex mutex;
  for (size_t i = 0; i < grads.size(); ++i) {
    const int format = checked_grad(op, grads[i], i);
    STD_TORCH_CHECK(grads[i].is_cpu(), op, ": gradient ", i, " is not on the CPU");
    const void* from = grads[i].const_data_ptr();
    parallel_for(grads[i].numel(), kGrain, [&](int64_t begin, int64_t end) {
      int64_t own[cpu::kSumWords] = {};
      cpu::add_powers(from, format, static_cast<int>(power), begin, end, own, kernels);
      const std::lock_guard lock(mutex);
      for (int k = 0; k < cpu::kSumWords; ++k) words[k] += own[k];
    });
    exact_carry(words);
  }
  return made;
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit, m) {
  m.def(
      "accumulate(Tensor(a!)[] buffers, Tensor(b!)[] compensation, Tensor[] grads, Tensor plan, "
      "int "
      "format, float scale, int seed) -> ()");
  m.def("exact_powers(Tensor[] grads, int power) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, m) {
  m.impl("accumulate", LOWBIT_OPERATOR(accumulate));
  m.impl("exact_powers", LOWBIT_OPERATOR(exact_powers));
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CUDA, m) { m.impl("accumulate", LOWBIT_OPERATOR(accumulate)); }
