// Reception of low-rank steps on a GPU: a pass over many matrices at once (cuda/abi.h). What
// lowbit/step/lowrank_cuda.py allocates, and in which order it asks for the passes,
// docs/definitions/lowrank.md says.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/exact_sum.h"
#include "core/lowrank/fixed.h"
#include "cuda/library.h"
#include "ops/ops.h"
#include "policy/lowrank_plan.h"

namespace lowbit {
namespace {

using torch::headeronly::ScalarType;

// Columns of plan and hyper, and the tensors of a matrix; lowbit/step/lowrank_cuda.py writes them.
using enum LowRankPlan::Column;
constexpr int kHypers = 8;
enum Read { kGrad, kStep, kLr, kReads };
enum Written {
  kParam,
  kCompensation,
  kP,
  kLow,
  kN,
  kScales,
  kResidual,
  kNorm,
  kAbsmax,
  kSums,
  kWords,
  kWrites
};
constexpr const char* kWhat[kWrites] = {"parameter", "the compensation", "P",    "L",      "N",
                                        "scales",    "residual",         "norm", "maxima", "sums",
                                        "words"};

constexpr const char* kOp = "lowbit::lowrank_pass";

/// A contiguous tensor on the device, of so many numbers of a dtype.
template <class T>
T* checked(const Tensor& t, const char* what, size_t i, ScalarType dtype, int64_t numel,
           const Device& device) {
  STD_TORCH_CHECK(device.has(t), kOp, ": ", what, " of matrix ", i, " is on ", Device(t).name(),
                  " and the table is on ", device.name());
  STD_TORCH_CHECK(t.is_contiguous() && t.scalar_type() == dtype && t.numel() == numel, kOp, ": ",
                  what, " of matrix ", i, " must be ", numel,
                  " contiguous numbers of its dtype on the parameters' device, and has ",
                  t.numel());
  return numel > 0 ? static_cast<T*>(t.mutable_data_ptr()) : nullptr;
}

/// The i-th matrix.
LowRankJob job_of(size_t i, const Tensors& read, const Tensors& written, const int64_t* row,
                  const double* hyper, const Device& device) {
  const Tensor* const in = &read[i * kReads];
  const Tensor* const out = &written[i * kWrites];
  for (const LowRankPlan::Column c : {kTall, kFira, kDraws, kByTensor, kLimits, kMaximize})
    STD_TORCH_CHECK(row[c] == 0 || row[c] == 1, kOp, ": the plan of matrix ", i, " is none");
  STD_TORCH_CHECK(row[kRows] >= 0 && row[kCols] >= 1 && row[kRank] >= 1 && row[kGap] >= 1 &&
                      row[kFirst] >= 0 && row[kFirstOfP] >= 0 && row[kParamFormat] >= 0 &&
                      row[kParamFormat] < param_count() && row[kRows] <= kFixedRows,
                  kOp, ": the plan of matrix ", i, " is none");
  LowRankJob job{};
  job.rows = row[kRows], job.cols = row[kCols], job.rank = row[kRank];
  job.first = row[kFirst], job.p_first = row[kFirstOfP], job.gap = row[kGap];
  job.seed = static_cast<uint64_t>(row[kSeed]), job.stream = static_cast<uint32_t>(row[kStream]);
  job.exponent = static_cast<int>(row[kExponent]);
  job.tall = row[kTall] != 0, job.fira = row[kFira] != 0, job.draws = row[kDraws] != 0;
  job.by_tensor = row[kByTensor] != 0, job.limits = row[kLimits] != 0;
  job.maximize = row[kMaximize] != 0;
  std::copy_n(hyper, 7, job.hyper);
  job.gamma = hyper[7];

  const int64_t size = job.rows * job.cols;
  job.param_format = static_cast<int>(row[kParamFormat]);
  job.grad_format = grad_format(in[kGrad]);
  STD_TORCH_CHECK(job.grad_format >= 0, kOp, ": gradient ", i,
                  " must be float32, bfloat16 or float16");
  job.grad = checked<void>(in[kGrad], "the gradient", i, in[kGrad].scalar_type(), size, device);
  job.step = checked<float>(in[kStep], "the step", i, ScalarType::Float, 1, device);
  if (in[kLr].numel() > 0) job.lr = one_float(in[kLr], kOp, "lr", device);

  const auto floats = [&](Written w, int64_t numel) {
    return checked<float>(out[w], kWhat[w], i, ScalarType::Float, numel, device);
  };
  const ParamInfo info = param_info(job.param_format);
  job.param = checked<void>(out[kParam], kWhat[kParam], i, scalar_type(info.dtype), size, device);
  if (info.compensation_dtype[0] != 0) {
    job.compensation = checked<void>(out[kCompensation], kWhat[kCompensation], i,
                                     scalar_type(info.compensation_dtype),
                                     size * compensation_width(info), device);
  }
  job.p = floats(kP, job.p_rows() * job.rank);
  job.low = floats(kLow, job.low_size()), job.n = floats(kN, job.low_size());
  job.scales = floats(kScales, job.channels());
  job.residual = floats(kResidual, job.fira ? size : 0);
  job.norm = floats(kNorm, 1);
  const int64_t cols = job.tall ? 0 : job.cols;
  job.absmax = checked<uint32_t>(out[kAbsmax], kWhat[kAbsmax], i, ScalarType::Int, cols, device);
  job.sums =
      checked<int64_t>(out[kSums], kWhat[kSums], i, ScalarType::Long, job.rank * cols, device);
  job.words = checked<int64_t>(out[kWords], kWhat[kWords], i, ScalarType::Long,
                               3 * ExactSum::kWords, device);
  return job;
}

/// A pass over matrices of one device. table: what the first pass leaves for the others.
void lowrank_pass(int64_t pass, Tensors read, Tensors written, Tensor plan, Tensor hyper,
                  Tensor table, MaybeTensor grad_scale, MaybeTensor found_inf) {
  const int64_t count = plan.size(0);
  STD_TORCH_CHECK(pass >= 0 && pass < kLowRankPasses, kOp, ": there is no pass ", pass);
  STD_TORCH_CHECK(plan.is_cpu() && plan.scalar_type() == ScalarType::Long && plan.dim() == 2 &&
                      plan.size(1) == kColumns && plan.is_contiguous(),
                  kOp, ": the plan must be an int64 CPU tensor [", count, ", ",
                  static_cast<int>(kColumns), "]");
  STD_TORCH_CHECK(hyper.is_cpu() && hyper.scalar_type() == ScalarType::Double &&
                      hyper.numel() == count * kHypers && hyper.is_contiguous(),
                  kOp, ": hyper must be a float64 CPU tensor [", count, ", ", kHypers, "]");
  STD_TORCH_CHECK(static_cast<int64_t>(read.size()) == count * kReads &&
                      static_cast<int64_t>(written.size()) == count * kWrites,
                  kOp, ": takes ", static_cast<int>(kReads), " and ", static_cast<int>(kWrites),
                  " tensors of each matrix");
  const auto room = static_cast<int64_t>(sizeof(LowRankJob)) * count;
  STD_TORCH_CHECK(table.is_cuda() && table.scalar_type() == ScalarType::Byte &&
                      table.is_contiguous() && table.numel() >= room,
                  kOp, ": the table must hold ", room, " bytes on the parameters' device");
  if (count == 0) return;
  const Device device(table);
  std::vector<LowRankJob> jobs;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i)
    jobs.push_back(job_of(i, read, written, plan.const_data_ptr<int64_t>() + i * kColumns,
                          hyper.const_data_ptr<double>() + i * kHypers, device));
  CudaLowRank call{};
  call.device = device.index;
  call.jobs = jobs.data(), call.count = count;
  call.pass = static_cast<LowRankPass>(pass);
  call.table = static_cast<LowRankJob*>(table.mutable_data_ptr());
  call.grad_scale = one_float(grad_scale, kOp, "grad_scale", device);
  call.found_inf = one_float(found_inf, kOp, "found_inf", device);
  const cuda::Library& library = cuda::library();
  STD_TORCH_CHECK(library.error == nullptr, kOp, " on CUDA: ", library.error);
  torch::stable::accelerator::DeviceGuard guard(device.index);
  call.stream = library.current_stream(device.index);
  const char* error = library.lowrank(&call);
  STD_TORCH_CHECK(error == nullptr, kOp, " on CUDA: ", error);
}

int64_t lowrank_room() { return static_cast<int64_t>(sizeof(LowRankJob)); }

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit, m) {
  m.def(
      "lowrank_pass(int number, Tensor[] read, Tensor(a!)[] written, Tensor plan, Tensor hyper, "
      "Tensor(b!) table, Tensor? grad_scale, Tensor? found_inf) -> ()");
  m.def("lowrank_room() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CUDA, m) {
  m.impl("lowrank_pass", LOWBIT_OPERATOR(lowrank_pass));
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CompositeExplicitAutograd, m) {
  m.impl("lowrank_room", LOWBIT_OPERATOR(lowrank_room));
}
