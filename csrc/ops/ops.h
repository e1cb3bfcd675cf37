// What the files of operators share. This room alone includes torch, through the LibTorch stable
// ABI.
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
#include <utility>
#include <vector>

#include "catalog/catalog.h"
#include "cpu/float_environment.h"

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
  /// Whether it is one of these, and not such as the meta device, which has no memory.
  bool has_memory() const { return cpu || index >= 0; }
  std::string name() const {
    if (!has_memory()) return "a device without memory";
    return cpu ? "the CPU" : "cuda:" + std::to_string(index);
  }
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

/// The index into a registry of what the catalog gives that number. Operators that steps call take
/// numbers, not names: up to torch 2.13 the stable ABI never frees a string argument.
inline int checked_number(const char* op, const char* what, int64_t number, int count) {
  STD_TORCH_CHECK(number >= 0 && number < count, op, ": no ", what, " has the number ", number,
                  "; lowbit.catalog() lists 0 to ", count - 1);
  return static_cast<int>(number);
}
inline int checked_state(const char* op, int64_t number) {
  return checked_number(op, "state format", number, state_count());
}
inline int checked_param(const char* op, int64_t number) {
  return checked_number(op, "parameter format", number, param_count());
}

/// A function as an operator: it computes in the default floating-point environment.
template <auto function>
struct Operator;
template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Operator<function> {
  static Result call(Arguments... arguments) {
    const cpu::FloatEnvironment environment;
    return function(std::forward<Arguments>(arguments)...);
  }
};
#define LOWBIT_OPERATOR(function) TORCH_BOX(&lowbit::Operator<&lowbit::function>::call)

/// In parallel over ranges of [0, count) of at least `grain` where there are so many:
/// body(begin, end), on threads that have floating-point environments of their own.
template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    const cpu::FloatEnvironment environment;
    body(begin, end);
  });
}

/// One row after another, tile by tile, in parallel over rows: kernel(row, column, length).
template <class Kernel>
void for_tiles(int64_t rows, int64_t cols, int64_t tile, const Kernel& kernel) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(cols, 1));
  parallel_for(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t col = 0; col < cols; col += tile)
        kernel(row, col, static_cast<int>(std::min<int64_t>(tile, cols - col)));
    }
  });
}

/// Elements of the compensation tensor for each value of the parameter: two bytes make 16 bits.
inline int compensation_width(const ParamInfo& info) {
  return std::strcmp(info.compensation_dtype, "uint8") == 0 ? info.compensation_bytes : 1;
}

/// Those of state first: this is asked for every tensor of a step.
inline torch::headeronly::ScalarType scalar_type(const char* dtype) {
  using torch::headeronly::ScalarType;
  if (std::strcmp(dtype, "uint8") == 0) return ScalarType::Byte;
  if (std::strcmp(dtype, "float32") == 0) return ScalarType::Float;
  if (std::strcmp(dtype, "bfloat16") == 0) return ScalarType::BFloat16;
  if (std::strcmp(dtype, "float16") == 0) return ScalarType::Half;
  if (std::strcmp(dtype, "int32") == 0) return ScalarType::Int;
  if (std::strcmp(dtype, "int64") == 0) return ScalarType::Long;
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
