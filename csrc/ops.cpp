// Reception: the schemas, their checks, and dispatch to a processor. The only C++ file that
// includes torch, through the LibTorch stable ABI, so one binary serves torch 2.11 and later.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "catalog.h"
#include "cpu/step.h"
#include "cuda/library.h"

namespace lowbit {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;

// Columns of a plan row; lowbit/layout.py writes them.
enum PlanColumn {
  kRows,
  kCols,
  kGlobalCols,
  kFirst,
  kStream,
  kParamFormat,
  kStateFormat,
  kStateBlock = kStateFormat + kMaxSlots,
  kPlanColumns = 16
};

ScalarType scalar_type(const char* dtype) {
  if (std::strcmp(dtype, "float32") == 0) return ScalarType::Float;
  if (std::strcmp(dtype, "bfloat16") == 0) return ScalarType::BFloat16;
  if (std::strcmp(dtype, "float16") == 0) return ScalarType::Half;
  STD_TORCH_CHECK(std::strcmp(dtype, "uint8") == 0, "a registered format has the unknown dtype ",
                  dtype);
  return ScalarType::Byte;
}

int grad_format(const Tensor& grad) {
  for (int i = 0; i < grad_count(); ++i) {
    if (grad.scalar_type() == scalar_type(grad_dtype(i))) return i;
  }
  return -1;
}

void check_tensor(const Tensor& t, const char* what, size_t i, ScalarType dtype, int64_t numel,
                  const Tensor& param) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, "lowbit::step: ", what, " of parameter ", i,
                  " has another dtype than its format");
  STD_TORCH_CHECK(t.numel() == numel, "lowbit::step: ", what, " of parameter ", i, " has ",
                  t.numel(), " elements, expected ", numel);
  STD_TORCH_CHECK(t.is_contiguous(), "lowbit::step: ", what, " of parameter ", i,
                  " is not contiguous");
  STD_TORCH_CHECK(t.get_device_index() == param.get_device_index() && t.is_cpu() == param.is_cpu(),
                  "lowbit::step: ", what, " of parameter ", i,
                  " is on another device than the parameter");
}

/// The jobs of a step, every tensor held against the plan.
std::vector<Job> make_jobs(int rule, const Tensors& params, const Tensors& grads,
                           const Tensors& state, const Tensors& steps, const Tensor& plan,
                           int64_t seed) {
  const size_t n = params.size();
  STD_TORCH_CHECK(grads.size() == n && steps.size() == n, "lowbit::step: ", n, " parameters, ",
                  grads.size(), " gradients, ", steps.size(), " steps");
  STD_TORCH_CHECK(plan.scalar_type() == ScalarType::Long && plan.is_cpu() && plan.is_contiguous() &&
                      plan.dim() == 2 && plan.size(0) == static_cast<int64_t>(n) &&
                      plan.size(1) == kPlanColumns,
                  "lowbit::step: plan must be an int64 CPU tensor [", n, ", ",
                  static_cast<int>(kPlanColumns), "]");
  const int64_t* row = plan.const_data_ptr<int64_t>();
  const int slots = rule_info(rule).slots;
  std::vector<Job> jobs(n);
  size_t next = 0;
  for (size_t i = 0; i < n; ++i, row += kPlanColumns) {
    Job& job = jobs[i];
    job.rule = rule;
    job.rows = row[kRows], job.cols = row[kCols], job.global_cols = row[kGlobalCols],
    job.first = row[kFirst];
    STD_TORCH_CHECK(job.rows >= 0 && job.cols >= 0 && job.first >= 0 && job.global_cols >= job.cols,
                    "lowbit::step: the plan of parameter ", i,
                    " has a negative or impossible size");
    job.random = {static_cast<uint32_t>(seed),
                  static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32), 0,
                  static_cast<uint32_t>(row[kStream])};
    job.param_format = static_cast<int>(row[kParamFormat]);
    STD_TORCH_CHECK(job.param_format >= 0 && job.param_format < param_count(),
                    "lowbit::step: parameter ", i, " has no format ", job.param_format);
    const int64_t numel = job.rows * job.cols;
    check_tensor(params[i], "the value", i, scalar_type(param_info(job.param_format).dtype), numel,
                 params[0]);
    job.grad_format = grad_format(grads[i]);
    STD_TORCH_CHECK(job.grad_format >= 0, "lowbit::step: the gradient of parameter ", i,
                    " must be float32, bfloat16 or float16");
    check_tensor(grads[i], "the gradient", i, grads[i].scalar_type(), numel, params[0]);
    STD_TORCH_CHECK(steps[i].scalar_type() == ScalarType::Float && steps[i].numel() == 1,
                    "lowbit::step: the step of parameter ", i, " must be one float32");
    job.param = params[i].mutable_data_ptr();
    job.grad = grads[i].const_data_ptr();
    for (int k = 0; k < slots; ++k) {
      const int64_t format = row[kStateFormat + k], block = row[kStateBlock + k];
      STD_TORCH_CHECK(format >= 0 && format < state_count(), "lowbit::step: slot ", k,
                      " of parameter ", i, " has no format ", format);
      const StateInfo info = state_info(static_cast<int>(format));
      STD_TORCH_CHECK(info.scaled ? block > 0 && block <= kTile && kTile % block == 0 : block == 0,
                      "lowbit::step: slot ", k, " of parameter ", i, " has a block length of ",
                      block, "; it must be a divisor of ", kTile,
                      " where the format has scales and 0 where not");
      STD_TORCH_CHECK(next + info.scaled < state.size(),
                      "lowbit::step: the list of state tensors ends at parameter ", i);
      const Tensor& values = state[next++];
      check_tensor(values, "the state", i, scalar_type(info.dtype),
                   info.scaled ? job.rows * code_bytes(job.cols, info.bits) : numel, params[0]);
      job.state[k] = {values.mutable_data_ptr(), nullptr, static_cast<int>(format),
                      static_cast<int>(block)};
      if (info.scaled) {
        const Tensor& scales = state[next++];
        check_tensor(scales, "the scale", i, ScalarType::Float,
                     job.rows * ceil_div(job.cols, block), params[0]);
        job.state[k].scales = static_cast<float*>(scales.mutable_data_ptr());
      }
    }
  }
  STD_TORCH_CHECK(next == state.size(), "lowbit::step: ", state.size(), " state tensors, ", next,
                  " wanted");
  return jobs;
}

/// The one number in a CPU tensor.
double number(const Tensor& t, const char* what) {
  STD_TORCH_CHECK(t.is_cpu() && t.numel() == 1, "lowbit::step: ", what,
                  " must be a CPU tensor of one element here");
  if (t.scalar_type() == ScalarType::Double) return *t.const_data_ptr<double>();
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, "lowbit::step: ", what,
                  " must be float32 or float64");
  return *t.const_data_ptr<float>();
}

int checked_rule(const std::string& name, const std::vector<double>& hyper) {
  const int rule = find_rule(name);
  STD_TORCH_CHECK(rule >= 0, "lowbit::step: no update rule is named '", name,
                  "'; lowbit.catalog() lists them");
  STD_TORCH_CHECK(static_cast<int>(hyper.size()) == rule_info(rule).hypers, "lowbit::step: ", name,
                  " takes ", rule_info(rule).hypers, " hyperparameters, not ", hyper.size());
  return rule;
}

void step_cpu(std::string name, Tensors params, Tensors grads, Tensors state, Tensors steps,
              Tensor plan, std::vector<double> hyper, MaybeTensor lr, MaybeTensor grad_scale,
              MaybeTensor found_inf, bool maximize, int64_t seed) {
  const int rule = checked_rule(name, hyper);
  if (params.empty()) return;
  std::vector<Job> jobs = make_jobs(rule, params, grads, state, steps, plan, seed);
  if (found_inf && number(*found_inf, "found_inf") != 0.0) return;
  if (lr) hyper[0] = number(*lr, "lr");
  const double g_scale =
      (maximize ? -1.0 : 1.0) / (grad_scale ? number(*grad_scale, "grad_scale") : 1.0);

  std::vector<int64_t> ends(jobs.size());  // running sum of tiles
  int64_t tiles = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    STD_TORCH_CHECK(steps[i].is_cpu(), "lowbit::step: the step of parameter ", i,
                    " must be on the CPU, as the parameter is");
    float* step = static_cast<float*>(steps[i].mutable_data_ptr());
    *step += 1.0f;
    const int64_t t = std::llrint(*step);
    prepare(jobs[i], hyper.data(), t, g_scale);
    jobs[i].random.step = static_cast<uint32_t>(t);
    jobs[i].write_param = hyper[0] != 0.0;
    ends[i] = tiles += jobs[i].tiles();
  }
  const cpu::Leaves& leaves = cpu::leaves();
  constexpr int64_t kGrain = 64;  // tiles, 16 thousand values: some 20 microseconds
  torch::stable::parallel_for(0, tiles, kGrain, [&](int64_t begin, int64_t end) {
    size_t i =
        static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (int64_t at = begin; at < end; at = ends[i++]) {
      const int64_t start = ends[i] - jobs[i].tiles();
      cpu::step(jobs[i], at - start, std::min(end, ends[i]) - start, leaves);
    }
  });
}

void step_cuda(std::string name, Tensors params, Tensors grads, Tensors state, Tensors steps,
               Tensor plan, std::vector<double> hyper, MaybeTensor lr, MaybeTensor grad_scale,
               MaybeTensor found_inf, bool maximize, int64_t seed) {
  const int rule = checked_rule(name, hyper);
  if (params.empty()) return;
  std::vector<Job> jobs = make_jobs(rule, params, grads, state, steps, plan, seed);
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
  call.device = params[0].get_device_index();
  torch::stable::accelerator::DeviceGuard guard(call.device);
  const Tensor workspace = torch::stable::new_empty(
      params[0], {library.workspace(static_cast<int64_t>(jobs.size()))}, ScalarType::Byte);
  call.stream = library.current_stream(call.device);
  call.jobs = jobs.data();
  call.count = static_cast<int64_t>(jobs.size());
  call.steps = step_pointers.data();
  call.hyper = hyper.data();
  call.hypers = static_cast<int>(hyper.size());
  call.lr = device_float(lr, "lr");
  call.grad_scale = device_float(grad_scale, "grad_scale");
  call.found_inf = device_float(found_inf, "found_inf");
  call.maximize = maximize;
  call.workspace = workspace.data_ptr();
  const char* error = library.step(&call);
  STD_TORCH_CHECK(error == nullptr, "lowbit::step on CUDA: ", error);
}

struct CodeShape {
  int format;
  StateInfo info;
};

CodeShape checked_format(const char* op, const std::string& name, int64_t block) {
  const int format = find_state(name);
  STD_TORCH_CHECK(format >= 0, op, ": no state format is named '", name,
                  "'; lowbit.catalog() lists them");
  const StateInfo info = state_info(format);
  STD_TORCH_CHECK(info.scaled, op, ": '", name, "' has no codes and scales");
  STD_TORCH_CHECK(block > 0 && block <= kTile && kTile % block == 0, op,
                  ": block must be a divisor of ", kTile, ", not ", block);
  return {format, info};
}

/// One row after another, tile by tile, in parallel over rows.
template <class Leaf>
void for_tiles(int64_t rows, int64_t cols, const Leaf& leaf) {
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(cols, 1)),
                              [&](int64_t begin, int64_t end) {
                                for (int64_t row = begin; row < end; ++row) {
                                  for (int64_t col = 0; col < cols; col += kTile)
                                    leaf(row, col,
                                         static_cast<int>(std::min<int64_t>(kTile, cols - col)));
                                }
                              });
}

void code_cuda(CudaCode call, const Tensor& on, bool encode) {
  const cuda::Library& library = cuda::library();
  STD_TORCH_CHECK(library.error == nullptr, "lowbit on CUDA: ", library.error);
  call.device = on.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(call.device);
  call.stream = library.current_stream(call.device);
  const char* error = (encode ? library.encode : library.decode)(&call);
  STD_TORCH_CHECK(error == nullptr, "lowbit on CUDA: ", error);
}

std::tuple<Tensor, Tensor> encode(Tensor x, std::string name, int64_t block) {
  const CodeShape shape = checked_format("lowbit::encode", name, block);
  STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::Float && x.is_contiguous(),
                  "lowbit::encode: x must be a contiguous float32 matrix");
  const int64_t rows = x.size(0), cols = x.size(1), bytes = code_bytes(cols, shape.info.bits),
                blocks = ceil_div(cols, block);
  Tensor codes = torch::stable::new_empty(x, {rows, bytes}, scalar_type(shape.info.dtype));
  Tensor scales = torch::stable::new_empty(x, {rows, blocks}, ScalarType::Float);
  auto* values = static_cast<float*>(x.data_ptr());
  auto* code = static_cast<uint8_t*>(codes.data_ptr());
  auto* scale = static_cast<float*>(scales.data_ptr());
  if (x.is_cuda()) {
    code_cuda({0, nullptr, shape.format, static_cast<int>(block), rows, cols, values, code, scale},
              x, true);
  } else {
    const auto leaf = cpu::leaves().encode[shape.format];
    for_tiles(rows, cols, [&](int64_t row, int64_t col, int n) {
      leaf(values + row * cols + col, code + row * bytes + code_bytes(col, shape.info.bits),
           scale + row * blocks + col / block, static_cast<int>(block), n);
    });
  }
  return {codes, scales};
}

Tensor decode(Tensor codes, Tensor scales, std::string name, int64_t block, int64_t cols) {
  const CodeShape shape = checked_format("lowbit::decode", name, block);
  const int64_t bytes = code_bytes(cols, shape.info.bits), blocks = ceil_div(cols, block);
  STD_TORCH_CHECK(codes.dim() == 2 && codes.size(1) == bytes &&
                      codes.scalar_type() == scalar_type(shape.info.dtype) && codes.is_contiguous(),
                  "lowbit::decode: codes of ", name, " must be a contiguous matrix of ", bytes,
                  " bytes a row for ", cols, " columns");
  const int64_t rows = codes.size(0);
  STD_TORCH_CHECK(scales.dim() == 2 && scales.size(0) == rows && scales.size(1) == blocks &&
                      scales.is_contiguous() && scales.scalar_type() == ScalarType::Float &&
                      scales.is_cpu() == codes.is_cpu(),
                  "lowbit::decode: scales must be a contiguous float32 matrix [", rows, ", ",
                  blocks, "] beside the codes");
  Tensor x = torch::stable::new_empty(codes, {rows, cols}, ScalarType::Float);
  auto* values = static_cast<float*>(x.data_ptr());
  auto* code = static_cast<uint8_t*>(codes.data_ptr());
  auto* scale = static_cast<float*>(scales.data_ptr());
  if (codes.is_cuda()) {
    code_cuda({0, nullptr, shape.format, static_cast<int>(block), rows, cols, values, code, scale},
              codes, false);
  } else {
    const auto leaf = cpu::leaves().decode[shape.format];
    for_tiles(rows, cols, [&](int64_t row, int64_t col, int n) {
      leaf(code + row * bytes + code_bytes(col, shape.info.bits),
           scale + row * blocks + col / block, static_cast<int>(block), values + row * cols + col,
           n);
    });
  }
  return x;
}

std::string catalog() { return catalog_json(); }

void set_isa(std::string name) {
  STD_TORCH_CHECK(cpu::set_isa(name.c_str()), "lowbit::set_isa: this processor runs ",
                  cpu::usable_isas(), ", not '", name, "'");
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY(lowbit, m) {
  m.def(
      "step(str rule, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state, Tensor(c!)[] steps, "
      "Tensor plan, float[] hyper, *, "
      "Tensor? lr=None, Tensor? grad_scale=None, Tensor? found_inf=None, bool maximize=False, int "
      "seed=0) -> ()");
  m.def("encode(Tensor x, str format, int block) -> (Tensor codes, Tensor scales)");
  m.def("decode(Tensor codes, Tensor scales, str format, int block, int cols) -> Tensor");
  m.def("catalog() -> str");
  m.def("set_isa(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, m) {
  m.impl("step", TORCH_BOX(&lowbit::step_cpu));
  m.impl("encode", TORCH_BOX(&lowbit::encode));
  m.impl("decode", TORCH_BOX(&lowbit::decode));
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CUDA, m) {
  m.impl("step", TORCH_BOX(&lowbit::step_cuda));
  m.impl("encode", TORCH_BOX(&lowbit::encode));
  m.impl("decode", TORCH_BOX(&lowbit::decode));
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CompositeExplicitAutograd, m) {
  m.impl("catalog", TORCH_BOX(&lowbit::catalog));
  m.impl("set_isa", TORCH_BOX(&lowbit::set_isa));
}
