// Codes without a step: for loading, looking and gathering.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <tuple>

#include "core/layout.h"
#include "cpu/step.h"
#include "cuda/library.h"
#include "ops/ops.h"

namespace lowbit {
namespace {

using torch::headeronly::ScalarType;

/// The format of that number; the rest of the shape checks follow from it.
int coded_format(const char* op, int64_t number) {
  const int format = checked_state(op, number);
  const StateInfo info = state_info(format);
  STD_TORCH_CHECK(info.scaled, op, ": '", info.name, "' has no codes and scales");
  return format;
}

void check_block(const char* op, int64_t block) {
  STD_TORCH_CHECK(block >= kMinBlock && block <= kMaxBlock && (block & (block - 1)) == 0, op,
                  ": block must be a power of two from ", kMinBlock, " to ", kMaxBlock, ", not ",
                  block);
}

void check_matrix(const char* op, const char* what, const Tensor& t, ScalarType dtype, int64_t rows,
                  int64_t cols) {
  STD_TORCH_CHECK(t.dim() == 2 && t.scalar_type() == dtype && t.is_contiguous() &&
                      (rows < 0 || t.size(0) == rows) && (cols < 0 || t.size(1) == cols),
                  op, ": ", what, " must be a contiguous matrix [", rows < 0 ? t.size(0) : rows,
                  ", ", cols < 0 ? t.size(1) : cols, "] of the format's dtype");
}

void code_cuda(CudaCode call, const Tensor& on, bool quantize) {
  const cuda::Library& library = cuda::library();
  STD_TORCH_CHECK(library.error == nullptr, "lowbit on CUDA: ", library.error);
  call.device = on.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(call.device);
  call.stream = library.current_stream(call.device);
  const char* error = (quantize ? library.quantize : library.dequantize)(&call);
  STD_TORCH_CHECK(error == nullptr, "lowbit on CUDA: ", error);
}

std::tuple<Tensor, Tensor> quantize(Tensor x, int64_t number, int64_t block) {
  const char* op = "lowbit::quantize";
  const int format = coded_format(op, number);
  const StateInfo info = state_info(format);
  check_block(op, block);
  check_matrix(op, "x", x, ScalarType::Float, -1, -1);
  const int64_t rows = x.size(0), cols = x.size(1), blocks = ceil_div(cols, block);
  const int64_t row_bytes = code_bytes(cols, info.bits), scale_bytes = blocks * info.scale_bytes;
  Tensor codes =
      torch::stable::new_empty(x, {rows, code_bytes(cols, info.bits)}, scalar_type(info.dtype));
  Tensor scales = torch::stable::new_empty(x, {rows, blocks * info.scale_numbers},
                                           scalar_type(info.scale_dtype));
  auto* values = static_cast<float*>(x.data_ptr());
  auto* code = static_cast<char*>(codes.data_ptr());
  auto* scale = static_cast<char*>(scales.data_ptr());
  if (x.is_cuda()) {
    code_cuda({0, nullptr, format, static_cast<int>(block), rows, cols, values, code, scale}, x,
              true);
  } else {
    const cpu::Kernels& kernels = cpu::kernels();
    for_tiles(rows, cols, std::max<int64_t>(kTile, block), [&](int64_t row, int64_t col, int n) {
      cpu::quantize_run(kernels, format, values + row * cols + col,
                        code + row * row_bytes + code_bytes(col, info.bits),
                        scale + row * scale_bytes + col / block * info.scale_bytes,
                        static_cast<int>(block), n);
    });
  }
  return {codes, scales};
}

Tensor dequantize(Tensor codes, Tensor scales, int64_t number, int64_t block, int64_t cols) {
  const char* op = "lowbit::dequantize";
  const int format = coded_format(op, number);
  const StateInfo info = state_info(format);
  check_block(op, block);
  const int64_t blocks = ceil_div(cols, block);
  check_matrix(op, "codes", codes, scalar_type(info.dtype), -1, code_bytes(cols, info.bits));
  const int64_t rows = codes.size(0);
  check_matrix(op, "scales", scales, scalar_type(info.scale_dtype), rows,
               blocks * info.scale_numbers);
  STD_TORCH_CHECK(Device(codes).has(scales), op, ": codes are on ", Device(codes).name(),
                  " and scales on ", Device(scales).name());
  const int64_t row_bytes = code_bytes(cols, info.bits), scale_bytes = blocks * info.scale_bytes;
  Tensor x = torch::stable::new_empty(codes, {rows, cols}, ScalarType::Float);
  auto* values = static_cast<float*>(x.data_ptr());
  auto* code = static_cast<char*>(codes.data_ptr());
  auto* scale = static_cast<char*>(scales.data_ptr());
  if (codes.is_cuda()) {
    code_cuda({0, nullptr, format, static_cast<int>(block), rows, cols, values, code, scale}, codes,
              false);
  } else {
    const auto kernel = cpu::kernels().dequantize[format];
    for_tiles(rows, cols, std::max<int64_t>(kTile, block), [&](int64_t row, int64_t col, int n) {
      kernel(code + row * row_bytes + code_bytes(col, info.bits),
             scale + row * scale_bytes + col / block * info.scale_bytes, static_cast<int>(block),
             values + row * cols + col, n);
    });
  }
  return x;
}

/// With a scale of its own for each value, on the CPU: for loading and looking, not for steps.
int given_format(const char* op, int64_t number) {
  const int format = coded_format(op, number);
  const StateInfo info = state_info(format);
  STD_TORCH_CHECK(info.cross_tile, op, ": '", info.name,
                  "' needs more than the largest magnitude for a scale");
  return format;
}

Tensor quantize_given(Tensor x, Tensor absmax, int64_t number) {
  const char* op = "lowbit::quantize_given";
  const int format = given_format(op, number);
  const StateInfo info = state_info(format);
  check_matrix(op, "x", x, ScalarType::Float, -1, -1);
  const int64_t rows = x.size(0), cols = x.size(1), row_bytes = code_bytes(cols, info.bits);
  check_matrix(op, "absmax", absmax, ScalarType::Float, rows, cols);
  Tensor codes =
      torch::stable::new_empty(x, {rows, code_bytes(cols, info.bits)}, scalar_type(info.dtype));
  const auto* values = static_cast<const float*>(x.const_data_ptr());
  const auto* bits = static_cast<const uint32_t*>(absmax.const_data_ptr());
  auto* code = static_cast<char*>(codes.data_ptr());
  const auto kernel = cpu::kernels().quantize_given[format];
  for_tiles(rows, cols, kTile, [&](int64_t row, int64_t col, int n) {
    kernel(values + row * cols + col, code + row * row_bytes + code_bytes(col, info.bits),
           bits + row * cols + col, n, nullptr);
  });
  return codes;
}

Tensor dequantize_given(Tensor codes, Tensor absmax, int64_t number) {
  const char* op = "lowbit::dequantize_given";
  const int format = given_format(op, number);
  const StateInfo info = state_info(format);
  check_matrix(op, "absmax", absmax, ScalarType::Float, -1, -1);
  const int64_t rows = absmax.size(0), cols = absmax.size(1),
                row_bytes = code_bytes(cols, info.bits);
  check_matrix(op, "codes", codes, scalar_type(info.dtype), rows, code_bytes(cols, info.bits));
  Tensor x = torch::stable::new_empty(absmax, {rows, cols}, ScalarType::Float);
  auto* values = static_cast<float*>(x.data_ptr());
  const auto* bits = static_cast<const uint32_t*>(absmax.const_data_ptr());
  const auto* code = static_cast<const char*>(codes.const_data_ptr());
  const auto kernel = cpu::kernels().dequantize_given[format];
  for_tiles(rows, cols, kTile, [&](int64_t row, int64_t col, int n) {
    kernel(code + row * row_bytes + code_bytes(col, info.bits), bits + row * cols + col,
           values + row * cols + col, n);
  });
  return x;
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit, m) {
  m.def("quantize(Tensor x, int format, int block) -> (Tensor codes, Tensor scales)");
  m.def("dequantize(Tensor codes, Tensor scales, int format, int block, int cols) -> Tensor");
  m.def("quantize_given(Tensor x, Tensor absmax, int format) -> Tensor");
  m.def("dequantize_given(Tensor codes, Tensor absmax, int format) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, m) {
  m.impl("quantize", LOWBIT_OPERATOR(quantize));
  m.impl("dequantize", LOWBIT_OPERATOR(dequantize));
  m.impl("quantize_given", LOWBIT_OPERATOR(quantize_given));
  m.impl("dequantize_given", LOWBIT_OPERATOR(dequantize_given));
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CUDA, m) {
  m.impl("quantize", LOWBIT_OPERATOR(quantize));
  m.impl("dequantize", LOWBIT_OPERATOR(dequantize));
}
