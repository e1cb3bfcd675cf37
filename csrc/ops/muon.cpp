// Reception of Muon's orthogonalization on the CPU (cpu/matrices/matmul.h). On a GPU:
// ops/muon_cuda.cpp.
#include <algorithm>
#include <vector>

#include "cpu/matrices/matmul.h"
#include "cpu/matrices/row_moment.h"
#include "ops/ops.h"

namespace lowbit {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kSmall = 1 << 18;  // elements of a matrix up to which several go side by side

void over_threads(int64_t count, const cpu::Body& body) { parallel_for(count, 1, body); }

/// Orthogonalizes the matrices of the last two dimensions in place.
void newton_schulz(Tensor x, std::vector<double> coefficients, double factor, double eps) {
  const char* op = "lowbit::newton_schulz";
  STD_TORCH_CHECK(
      x.dim() >= 2 && x.scalar_type() == ScalarType::BFloat16 && x.is_contiguous() && x.is_cpu(),
      op, ": takes a contiguous bfloat16 matrix on the CPU, or a batch of them");
  STD_TORCH_CHECK(coefficients.size() % 3 == 0, op,
                  ": takes three coefficients for each step, not ", coefficients.size(), " in all");
  const cpu::NewtonSchulz how{coefficients.data(), static_cast<int>(coefficients.size() / 3),
                              factor, eps};
  const int64_t rows = x.size(x.dim() - 2), cols = x.size(x.dim() - 1), each = rows * cols;
  if (each == 0) return;
  const int64_t count = x.numel() / each;
  auto* const at = static_cast<uint16_t*>(x.mutable_data_ptr());
  if (count > 1 && each <= kSmall) {
    over_threads(count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        cpu::newton_schulz(how, at + i * each, rows, cols, at + i * each, cpu::one_thread);
    });
    return;
  }
  for (int64_t i = 0; i < count; ++i)
    cpu::newton_schulz(how, at + i * each, rows, cols, at + i * each, over_threads);
}

/// NorMuon's rows of orthogonalized matrices in place (core/muon/row_moment.h); moments: one for
/// each row.
void normalize_rows(Tensor x, Tensor moments, double beta2) {
  const char* op = "lowbit::normalize_rows";
  STD_TORCH_CHECK(
      x.dim() >= 2 && x.scalar_type() == ScalarType::BFloat16 && x.is_contiguous() && x.is_cpu(),
      op, ": takes a contiguous bfloat16 matrix on the CPU, or a batch of them");
  const int64_t rows = x.size(x.dim() - 2), cols = x.size(x.dim() - 1);
  STD_TORCH_CHECK(moments.scalar_type() == ScalarType::Float && moments.is_contiguous() &&
                      moments.is_cpu() && moments.numel() * cols == x.numel(),
                  op, ": takes a contiguous float32 moment for each row, on the CPU");
  if (x.numel() == 0) return;
  cpu::normalize_rows(static_cast<uint16_t*>(x.mutable_data_ptr()),
                      static_cast<float*>(moments.mutable_data_ptr()), moments.numel() / rows, rows,
                      cols, beta2, over_threads);
}

/// a b^T in float32, each output one chain.
Tensor bfloat16_product(Tensor a, Tensor b) {
  const char* op = "lowbit::bfloat16_product";
  for (const Tensor& t : {a, b}) {
    STD_TORCH_CHECK(t.dim() == 2 && t.scalar_type() == ScalarType::BFloat16 && t.is_contiguous() &&
                        t.is_cpu() && t.size(1) == a.size(1),
                    op,
                    ": takes two contiguous bfloat16 matrices on the CPU with rows of one length");
  }
  const int64_t rows = a.size(0), cols = b.size(0), depth = a.size(1);
  Tensor out = torch::stable::new_empty(a, {rows, cols}, ScalarType::Float);
  auto* const sums = static_cast<float*>(out.mutable_data_ptr());
  if (depth == 0) std::fill(sums, sums + rows * cols, 0.0f);
  const cpu::Values left{static_cast<const uint16_t*>(a.const_data_ptr()), depth};
  const cpu::Values right{static_cast<const uint16_t*>(b.const_data_ptr()), depth};
  if (depth != 0) {
    cpu::multiply(
        {rows, cols, depth, left, right, true, false, false, nullptr, 1.0f, 0.0f, nullptr, sums},
        over_threads);
  }
  return out;
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_FRAGMENT(lowbit, m) {
  m.def("newton_schulz(Tensor(a!) x, float[] coefficients, float factor, float eps) -> ()");
  m.def("normalize_rows(Tensor(a!) x, Tensor(b!) moments, float beta2) -> ()");
  m.def("bfloat16_product(Tensor a, Tensor b) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, m) {
  m.impl("newton_schulz", LOWBIT_OPERATOR(newton_schulz));
  m.impl("normalize_rows", LOWBIT_OPERATOR(normalize_rows));
  m.impl("bfloat16_product", LOWBIT_OPERATOR(bfloat16_product));
}
