// Reception of means of gradients that do not depend on the order of the addends
// (core/mean_bins.h).
#include <torch/csrc/stable/accelerator.h>

#include <map>
#include <vector>

#include "core/mean_bins.h"
#include "cpu/mean.h"
#include "cpu/step.h"
#include "cuda/library.h"
#include "ops/ops.h"

namespace lowbit {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kMeanGrain = 8192;  // elements that a thread begins for

void add_on_cpu(const std::vector<MeanSum>& sums) {
  const cpu::Kernels& kernels = cpu::kernels();
  for (const MeanSum& sum : sums) {
    parallel_for(sum.n, kMeanGrain,
                 [&](int64_t begin, int64_t end) { cpu::add_means(sum, begin, end, kernels); });
  }
}

void add_on_cuda(const char* op, int device, const std::vector<MeanSum>& sums) {
  const cuda::Library& library = cuda::library();
  STD_TORCH_CHECK(library.error == nullptr, op, " on CUDA: ", library.error);
  torch::stable::accelerator::DeviceGuard guard(device);
  const CudaMeans call{device, library.current_stream(device), sums.data(),
                       static_cast<int64_t>(sums.size())};
  const char* error = library.means(&call);
  STD_TORCH_CHECK(error == nullptr, op, " on CUDA: ", error);
}

/// One device's calls after another's.
void add_all(const char* op, const std::map<int, std::vector<MeanSum>>& by_device) {
  for (const auto& [device, sums] : by_device)
    device < 0 ? add_on_cpu(sums) : add_on_cuda(op, device, sums);
}

int checked_width(const char* op, int64_t terms) {
  STD_TORCH_CHECK(terms >= 1 && terms <= MeanBins::kMaxTerms, op,
                  ": the number of addends must be 1 to ", MeanBins::kMaxTerms, ", not ", terms);
  return bin_width(terms);
}

/// The addends of sum i, n elements each.
void read_addends(const char* op, size_t i, const Tensor& addends, int64_t n, MeanSum& sum) {
  sum.addend_format =
      addends.scalar_type() == ScalarType::Long ? MeanSum::kWords : grad_format(addends);
  STD_TORCH_CHECK(sum.addend_format >= 0 || addends.scalar_type() == ScalarType::Long, op,
                  ": addends ", i, " must be float32, bfloat16 or float16, or int64 words of sums");
  STD_TORCH_CHECK(addends.dim() == 2 && addends.size(1) == n && (n <= 1 || addends.stride(1) == 1),
                  op, ": addends ", i, " must be [rows, ", n, "], each row contiguous");
  sum.n = n, sum.rows = addends.size(0), sum.stride = addends.stride(0);
  sum.addends = addends.const_data_ptr();
}

void read_words(const char* op, size_t i, const Tensor& words, int64_t n, const Device& device) {
  STD_TORCH_CHECK(words.scalar_type() == ScalarType::Long && words.is_contiguous() &&
                      words.numel() == n && device.has(words),
                  op, ": words ", i, " must be a contiguous int64 tensor of ", n, " elements on ",
                  device.name());
}

void mean_add(Tensors words, Tensors addends, int64_t terms) {
  const char* op = "lowbit::mean_add";
  STD_TORCH_CHECK(words.size() == addends.size(), op, ": ", words.size(), " words, ",
                  addends.size(), " addends");
  std::map<int, std::vector<MeanSum>> by_device;  // the CPU is -1
  for (size_t i = 0; i < words.size(); ++i) {
    MeanSum sum{};
    sum.width = checked_width(op, terms);
    const Device device(addends[i]);
    read_words(op, i, words[i], words[i].numel(), device);
    read_addends(op, i, addends[i], words[i].numel(), sum);
    sum.words = reinterpret_cast<uint64_t*>(words[i].mutable_data_ptr<int64_t>());
    by_device[device.cpu ? -1 : device.index].push_back(sum);
  }
  add_all(op, by_device);
}

void mean_of(Tensors words, Tensors addends, Tensors means, int64_t terms, int64_t divisor) {
  const char* op = "lowbit::mean_of";
  STD_TORCH_CHECK((words.empty() || words.size() == means.size()) &&
                      (addends.empty() || addends.size() == means.size()),
                  op, ": ", words.size(), " words, ", addends.size(), " addends, ", means.size(),
                  " means");
  STD_TORCH_CHECK(divisor >= 1 && divisor <= int64_t{1} << 24, op,
                  ": the divisor must be 1 to 2^24, not ", divisor);
  std::map<int, std::vector<MeanSum>> by_device;
  for (size_t i = 0; i < means.size(); ++i) {
    MeanSum sum{};
    sum.width = checked_width(op, terms), sum.divisor = divisor;
    const Device device(means[i]);
    const int64_t n = means[i].numel();
    sum.mean_format = grad_format(means[i]);
    STD_TORCH_CHECK(sum.mean_format >= 0 && means[i].is_contiguous(), op, ": mean ", i,
                    " must be a contiguous float32, bfloat16 or float16 tensor");
    sum.n = n;
    if (!addends.empty()) {
      STD_TORCH_CHECK(device.has(addends[i]), op, ": addends ", i, " must be on ", device.name());
      read_addends(op, i, addends[i], n, sum);
    }
    if (!words.empty()) {
      read_words(op, i, words[i], n, device);
      sum.words = reinterpret_cast<uint64_t*>(words[i].mutable_data_ptr<int64_t>());
    }
    sum.mean = means[i].mutable_data_ptr();
    by_device[device.cpu ? -1 : device.index].push_back(sum);
  }
  add_all(op, by_device);
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit, m) {
  m.def("mean_add(Tensor(a!)[] words, Tensor[] addends, int terms) -> ()");
  m.def(
      "mean_of(Tensor[] words, Tensor[] addends, Tensor(a!)[] means, int terms, int divisor) -> "
      "()");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, m) {
  m.impl("mean_add", LOWBIT_OPERATOR(mean_add));
  m.impl("mean_of", LOWBIT_OPERATOR(mean_of));
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CUDA, m) {
  m.impl("mean_add", LOWBIT_OPERATOR(mean_add));
  m.impl("mean_of", LOWBIT_OPERATOR(mean_of));
}
