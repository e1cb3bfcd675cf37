// What the files of operators share. With ops_*.h and ops*.cpp the only place that includes torch,
// through the LibTorch stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "catalog.h"

namespace lowbit {

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;

/// Where the tensors of a call are: the CPU, or one GPU of several. What lies on another GPU is as
/// little to be read by a kernel as what lies on the host.
struct Device {
  bool cpu;
  int32_t index;
  explicit Device(const Tensor& t) : cpu(t.is_cpu()), index(t.get_device_index()) {}
  bool has(const Tensor& t) const {
    return t.is_cpu() == cpu && (cpu || t.get_device_index() == index);
  }
  std::string name() const { return cpu ? "the CPU" : "cuda:" + std::to_string(index); }
};

/// One float32 that kernels read, which must be on that GPU; null where none is given.
inline const float* one_float(const MaybeTensor& t, const char* op, const char* what,
                              const Device& device) {
  if (!t) return nullptr;
  STD_TORCH_CHECK(device.has(*t), op, ": ", what, " is on ", Device(*t).name(),
                  " and the parameters are on ", device.name(), "; it must be where they are");
  STD_TORCH_CHECK(t->numel() == 1 && t->scalar_type() == torch::headeronly::ScalarType::Float, op,
                  ": ", what, " must be one float32 on the parameters' device");
  return t->const_data_ptr<float>();
}

/// What the operator `step` takes.
struct StepArgs {
  const std::string& rule;
  const Tensors &params, &grads, &state, &steps, &scratch;
  const Tensor& plan;
  std::vector<double> hyper;
  MaybeTensor lr, grad_scale, found_inf;
  bool maximize;
  int64_t seed, phase;
};

/// One phase of a step, on the device where the parameters are.
void step(StepArgs args);

/// One row after another, tile by tile, in parallel over rows: leaf(row, column, length).
template <class Leaf>
void for_tiles(int64_t rows, int64_t cols, int64_t tile, const Leaf& leaf) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(cols, 1));
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t col = 0; col < cols; col += tile)
        leaf(row, col, static_cast<int>(std::min<int64_t>(tile, cols - col)));
    }
  });
}

/// Elements of the tensor beside the parameter for each of its values: two bytes make 16 bits.
inline int extra_width(const ParamInfo& info) {
  return std::strcmp(info.extra_dtype, "uint8") == 0 ? info.extra_bytes : 1;
}

/// Those of state first: this is asked for every tensor of a step.
inline torch::headeronly::ScalarType scalar_type(const char* dtype) {
  using torch::headeronly::ScalarType;
  if (std::strcmp(dtype, "uint8") == 0) return ScalarType::Byte;
  if (std::strcmp(dtype, "float32") == 0) return ScalarType::Float;
  if (std::strcmp(dtype, "bfloat16") == 0) return ScalarType::BFloat16;
  if (std::strcmp(dtype, "float16") == 0) return ScalarType::Half;
  STD_TORCH_CHECK(std::strcmp(dtype, "int8") == 0, "lowbit has no tensors of dtype '", dtype, "'");
  return ScalarType::Char;
}

/// The index into GradFormats, -1 where the dtype is none of them.
inline int grad_format(const torch::stable::Tensor& grad) {
  for (int i = 0; i < grad_count(); ++i) {
    if (grad.scalar_type() == scalar_type(grad_dtype(i))) return i;
  }
  return -1;
}

}  // namespace lowbit
