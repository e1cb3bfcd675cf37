// Parameters without a step: the float32 values of what is stored, and what values are stored as.
#include <cstdint>
#include <tuple>
#include <vector>

#include "cpu/step.h"
#include "ops/ops.h"

namespace lowbit {
namespace {

using torch::headeronly::ScalarType;

/// The float32 values of a parameter and its compensation.
Tensor join(Tensor stored, MaybeTensor compensation, int64_t number) {
  const char* op = "lowbit::join";
  const int format = checked_param(op, number);
  const ParamInfo info = param_info(format);
  STD_TORCH_CHECK(stored.scalar_type() == scalar_type(info.dtype) && stored.is_contiguous(), op,
                  ": the parameter must be contiguous ", info.dtype);
  const bool compensated = info.compensation_bytes > 0;
  STD_TORCH_CHECK(
      !compensated ||
          (compensation && compensation->scalar_type() == scalar_type(info.compensation_dtype) &&
           compensation->is_contiguous() &&
           compensation->numel() == stored.numel() * compensation_width(info)),
      op, ": '", info.name, "' wants a contiguous ", info.compensation_dtype,
      " compensation of the parameter's size");
  Tensor x = torch::stable::new_empty(stored, stored.sizes(), ScalarType::Float);
  const auto* in = static_cast<const char*>(stored.const_data_ptr());
  const auto* more =
      compensated ? static_cast<const char*>(compensation->const_data_ptr()) : nullptr;
  auto* out = static_cast<float*>(x.data_ptr());
  const auto kernel = cpu::kernels().load_param[format];
  for_tiles(1, stored.numel(), kTile, [&](int64_t, int64_t at, int n) {
    kernel(in + at * info.bytes, more ? more + at * info.compensation_bytes : nullptr, out + at, n);
  });
  return x;
}

/// The parameter that float32 values are stored as, and its compensation (empty where it has not
/// any). Random bits are those of elements counted from 0.
std::tuple<Tensor, Tensor> split(Tensor x, int64_t number, int64_t seed, int64_t stream) {
  const char* op = "lowbit::split";
  const int format = checked_param(op, number);
  const ParamInfo info = param_info(format);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.is_contiguous(), op,
                  ": x must be contiguous float32");
  const bool compensated = info.compensation_bytes > 0;
  Tensor stored = torch::stable::new_empty(x, x.sizes(), scalar_type(info.dtype));
  const int64_t none[] = {0};
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  if (compensation_width(info) > 1) sizes.push_back(compensation_width(info));
  Tensor compensation =
      compensated ? torch::stable::new_empty(x, sizes, scalar_type(info.compensation_dtype))
                  : torch::stable::new_empty(x, none, ScalarType::Byte);
  const auto* in = static_cast<const float*>(x.const_data_ptr());
  auto* out = static_cast<char*>(stored.data_ptr());
  auto* more = static_cast<char*>(compensation.data_ptr());
  const RandomKey key = random_key(static_cast<uint64_t>(seed), 0, static_cast<uint32_t>(stream));
  const cpu::Kernels& kernels = cpu::kernels();
  for_tiles(1, x.numel(), kTile, [&](int64_t, int64_t at, int n) {
    uint16_t random16[kTile + 8 * 8];
    kernels.draw({key, static_cast<uint64_t>(at) >> 3, (n + 7) / 8, random16});
    kernels.store_param[format](in + at, out + at * info.bytes,
                                compensated ? more + at * info.compensation_bytes : nullptr, n,
                                random16);
  });
  return {stored, compensation};
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit, m) {
  m.def("join(Tensor stored, Tensor? compensation, int format) -> Tensor");
  m.def(
      "split(Tensor x, int format, int seed, int stream) -> (Tensor stored, Tensor compensation)");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, m) {
  m.impl("join", LOWBIT_OPERATOR(join));
  m.impl("split", LOWBIT_OPERATOR(split));
}
