// Reception of Muon's orthogonalization on a GPU (cuda/muon_abi.h). The schemas are in
// ops/muon.cpp.
#include <torch/csrc/stable/accelerator.h>

#include "cuda/library.h"
#include "ops/ops.h"

namespace lowbit {
namespace {

using torch::headeronly::ScalarType;

/// A contiguous tensor on the GPU of x, of so many numbers of a dtype.
void* on_gpu(const char* op, const char* what, const Tensor& t, ScalarType dtype, int64_t numel,
             const Tensor& x) {
  STD_TORCH_CHECK(
      t.is_contiguous() && t.scalar_type() == dtype && t.numel() == numel && Device(x).has(t), op,
      ": takes ", what, " as ", numel, " contiguous numbers of its dtype on ", Device(x).name(),
      ", not ", t.numel(), " on ", Device(t).name());
  return t.mutable_data_ptr();
}

/// Matrices of the last two dimensions.
struct Matrices {
  int64_t count, rows, cols;
  Matrices(const char* op, const Tensor& x) {
    STD_TORCH_CHECK(
        x.dim() >= 2 && x.scalar_type() == ScalarType::BFloat16 && x.is_contiguous() && x.is_cuda(),
        op, ": takes a contiguous bfloat16 matrix on a GPU, or a batch of them");
    rows = x.size(x.dim() - 2), cols = x.size(x.dim() - 1);
    count = x.numel() == 0 ? 0 : x.numel() / (rows * cols);
  }
};

/// The CUDA library, asked for before memory is.
const cuda::Library& library_for(const char* op) {
  const cuda::Library& library = cuda::library();
  STD_TORCH_CHECK(library.error == nullptr, op, " on CUDA: ", library.error);
  return library;
}

/// Calls a function of the library on torch's current stream of the tensor's GPU.
template <class Call>
void on_stream(const char* op, const Tensor& x, const cuda::Library& library, Call& call,
               const char* (*cuda::Library::*function)(const Call*)) {
  const Device device(x);
  torch::stable::accelerator::DeviceGuard guard(device.index);
  call.device = device.index;
  call.stream = library.current_stream(device.index);
  const char* error = (library.*function)(&call);
  STD_TORCH_CHECK(error == nullptr, op, " on CUDA: ", error);
}

void newton_schulz_on_gpu(Tensor x, std::vector<double> coefficients, double factor, double eps) {
  const char* op = "lowbit::newton_schulz";
  const Matrices m(op, x);
  STD_TORCH_CHECK(coefficients.size() % 3 == 0, op,
                  ": takes three coefficients for each step, not ", coefficients.size(), " in all");
  if (m.count == 0) return;
  const cuda::Library& library = library_for(op);
  CudaNewtonSchulz call{};
  call.x = static_cast<uint16_t*>(x.mutable_data_ptr());
  call.count = m.count, call.rows = m.rows, call.cols = m.cols;
  call.coefficients = coefficients.data();
  call.steps = static_cast<int>(coefficients.size() / 3);
  call.factor = factor, call.eps = eps;
  const Tensor room = torch::stable::new_empty(x, {NewtonSchulzRoom(call).bytes}, ScalarType::Byte);
  call.workspace = room.mutable_data_ptr();
  on_stream(op, x, library, call, &cuda::Library::newton_schulz);
}

void normalize_rows_on_gpu(Tensor x, Tensor moments, double beta2) {
  const char* op = "lowbit::normalize_rows";
  const Matrices m(op, x);
  if (m.count == 0) return;
  const int64_t rows = m.count * m.rows;
  CudaRowMoments call{};
  call.x = static_cast<uint16_t*>(x.mutable_data_ptr());
  call.moments =
      static_cast<float*>(on_gpu(op, "the moments of rows", moments, ScalarType::Float, rows, x));
  call.count = m.count, call.rows = m.rows, call.cols = m.cols;
  call.beta2 = beta2;
  const cuda::Library& library = library_for(op);
  const Tensor squares = torch::stable::new_empty(x, {rows}, ScalarType::Double);
  const Tensor factors = torch::stable::new_empty(x, {rows}, ScalarType::Float);
  call.squares = static_cast<double*>(squares.mutable_data_ptr());
  call.factors = static_cast<float*>(factors.mutable_data_ptr());
  on_stream(op, x, library, call, &cuda::Library::row_moments);
}

Tensor bfloat16_product_on_gpu(Tensor a, Tensor b) {
  const char* op = "lowbit::bfloat16_product";
  const Matrices left(op, a), right(op, b);
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(1) && Device(a).has(b), op,
                  ": takes two contiguous bfloat16 matrices on one device with rows of one length");
  const cuda::Library& library = library_for(op);
  Tensor out = torch::stable::new_empty(a, {left.rows, right.rows}, ScalarType::Float);
  if (out.numel() == 0) return out;
  CudaProduct call{};
  call.a = static_cast<const uint16_t*>(a.const_data_ptr());
  call.b = static_cast<const uint16_t*>(b.const_data_ptr());
  call.rows = left.rows, call.cols = right.rows, call.depth = left.cols;
  call.sums = static_cast<float*>(out.mutable_data_ptr());
  on_stream(op, a, library, call, &cuda::Library::product);
  return out;
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY_IMPL(lowbit, CUDA, m) {
  m.impl("newton_schulz", LOWBIT_OPERATOR(newton_schulz_on_gpu));
  m.impl("normalize_rows", LOWBIT_OPERATOR(normalize_rows_on_gpu));
  m.impl("bfloat16_product", LOWBIT_OPERATOR(bfloat16_product_on_gpu));
}
