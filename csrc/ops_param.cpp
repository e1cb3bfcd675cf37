// Parameters without a step: the float32 values of what is stored, and what values are stored as.
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/step.h"
#include "ops.h"

namespace lowbit {
namespace {

using torch::headeronly::ScalarType;

int param_format(const char* op, const std::string& name) {
  const int format = find_param(name);
  STD_TORCH_CHECK(format >= 0, op, ": no parameter format is named '", name,
                  "'; lowbit.catalog() lists them");
  return format;
}

/// The float32 values of a parameter and what its format keeps beside it.
Tensor join(Tensor stored, MaybeTensor extra, std::string name) {
  const char* op = "lowbit::join";
  const int format = param_format(op, name);
  const ParamInfo info = param_info(format);
  STD_TORCH_CHECK(stored.scalar_type() == scalar_type(info.dtype) && stored.is_contiguous(), op,
                  ": the parameter must be contiguous ", info.dtype);
  const bool beside = info.extra_bytes > 0;
  STD_TORCH_CHECK(
      !beside || (extra && extra->scalar_type() == scalar_type(info.extra_dtype) &&
                  extra->is_contiguous() && extra->numel() == stored.numel() * extra_width(info)),
      op, ": '", name, "' wants a contiguous ", info.extra_dtype,
      " tensor beside the parameter, of its size");
  Tensor x = torch::stable::new_empty(stored, stored.sizes(), ScalarType::Float);
  const auto* in = static_cast<const char*>(stored.const_data_ptr());
  const auto* more = beside ? static_cast<const char*>(extra->const_data_ptr()) : nullptr;
  auto* out = static_cast<float*>(x.data_ptr());
  const auto leaf = cpu::leaves().load_param[format];
  for_tiles(1, stored.numel(), kTile, [&](int64_t, int64_t at, int n) {
    leaf(in + at * info.bytes, more ? more + at * info.extra_bytes : nullptr, out + at, n);
  });
  return x;
}

/// The parameter that float32 values are stored as, and what is kept beside it (empty where nothing
/// is). Random bits are those of elements counted from 0.
std::tuple<Tensor, Tensor> split(Tensor x, std::string name, int64_t seed, int64_t stream) {
  const char* op = "lowbit::split";
  const int format = param_format(op, name);
  const ParamInfo info = param_info(format);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.is_contiguous(), op,
                  ": x must be contiguous float32");
  const bool beside = info.extra_bytes > 0;
  Tensor stored = torch::stable::new_empty(x, x.sizes(), scalar_type(info.dtype));
  const int64_t none[] = {0};
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  if (extra_width(info) > 1) sizes.push_back(extra_width(info));
  Tensor extra = beside ? torch::stable::new_empty(x, sizes, scalar_type(info.extra_dtype))
                        : torch::stable::new_empty(x, none, ScalarType::Byte);
  const auto* in = static_cast<const float*>(x.const_data_ptr());
  auto* out = static_cast<char*>(stored.data_ptr());
  auto* more = static_cast<char*>(extra.data_ptr());
  const RandomKey key = random_key(static_cast<uint64_t>(seed), 0, static_cast<uint32_t>(stream));
  const cpu::Leaves& leaves = cpu::leaves();
  for_tiles(1, x.numel(), kTile, [&](int64_t, int64_t at, int n) {
    uint16_t random16[kTile + 8 * 8];
    leaves.draw({key, static_cast<uint64_t>(at) >> 3, (n + 7) / 8, random16});
    leaves.store_param[format](in + at, out + at * info.bytes,
                               beside ? more + at * info.extra_bytes : nullptr, n, random16);
  });
  return {stored, extra};
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit, m) {
  m.def("join(Tensor stored, Tensor? extra, str format) -> Tensor");
  m.def("split(Tensor x, str format, int seed, int stream) -> (Tensor stored, Tensor extra)");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, m) {
  m.impl("join", TORCH_BOX(&lowbit::join));
  m.impl("split", TORCH_BOX(&lowbit::split));
}
