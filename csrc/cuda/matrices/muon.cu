// The launcher of Muon's orthogonalization (cuda/muon_abi.h). Host code, compiled with the kernels.
#include <utility>

#include "cuda/launch.h"
#include "cuda/matrices/muon_elements.cuh"
#include "cuda/matrices/muon_product.cuh"
#include "cuda/muon_abi.h"

namespace lowbit::cuda {
namespace {

/// Launches in order until one fails.
struct Launches {
  void* stream;
  const char* error = nullptr;

  template <class... Expected, class... Given>
  void operator()(void (*kernel)(Expected...), int64_t blocks, int threads, const char* name,
                  const Given&... given) {
    if (error == nullptr && blocks > 0)
      error = launch(kernel, blocks, threads, stream, name, given...);
  }
  void zero(void* at, size_t bytes) {
    if (error == nullptr)
      error = explain(cudaMemsetAsync(at, 0, bytes, static_cast<cudaStream_t>(stream)),
                      "clearing the sums of matrices");
  }
};

const char* load_kernels(int device) {
  static thread_local uint64_t loaded = 0;
  return begin(device, loaded, muon_absmax, muon_squares, muon_divisors, muon_divide,
               muon_row_squares, muon_row_factors, muon_rows, muon_product<false, false>,
               muon_product<false, true>, muon_product<true, true>);
}

/// across: whether values with neighboring indices are neighbors, else those with neighboring
/// terms.
struct Factor {
  MuonFactor factor;
  bool across;
};
Factor factor_of(const uint16_t* x, int64_t stride, int64_t size, bool across) {
  const bool aligned = reinterpret_cast<uintptr_t>(x) % 16 == 0;
  return {{x, stride, size, aligned && stride % 8 == 0}, across};
}

void multiply(Launches& launches, MuonProduct p, const Factor& a, const Factor& b) {
  p.a = a.factor, p.b = b.factor;
  const auto kernel = !b.across  ? muon_product<false, false>
                      : a.across ? muon_product<true, true>
                                 : muon_product<false, true>;
  launches(kernel, p.count * p.tiles(), kMuonThreads, "multiplying matrices", p);
}

MuonParts parts_of(const uint16_t* x, int64_t count, int64_t each, uint16_t* out) {
  MuonParts parts{};
  parts.x = x, parts.count = count, parts.each = each, parts.out = out;
  return parts;
}

/// Divides x by its norm, and writes it to `out`, which may be x.
void normalize(Launches& launches, const CudaNewtonSchulz& call, const NewtonSchulzRoom& room,
               uint16_t* out) {
  MuonParts parts = parts_of(call.x, call.count, call.rows * call.cols, out);
  parts.absmax = room.absmax, parts.words = room.words, parts.divisor = room.divisor;
  const int64_t blocks = call.count * parts.parts();
  launches.zero(room.absmax, static_cast<size_t>(call.count) * sizeof(uint32_t));
  launches.zero(room.words, static_cast<size_t>(call.count) * ExactSum::kWords * sizeof(int64_t));
  launches(muon_absmax, blocks, kPartThreads, "measuring matrices", parts);
  launches(muon_squares, blocks, kPartThreads, "summing squares of matrices", parts);
  launches(muon_divisors, ceil_div(call.count, kDivisors), kDivisors, "computing norms", room.words,
           room.absmax, room.divisor, call.count, call.factor, call.eps);
  launches(muon_divide, blocks, kPartThreads, "normalizing matrices", parts);
}

/// A tall matrix stays as it lies: with Y = X^T, X^T X is Y Y^T and X B is (B Y)^T, term by term.
const char* newton_schulz(const CudaNewtonSchulz& call) {
  if (const char* error = load_kernels(call.device)) return error;
  const NewtonSchulzRoom room(call);
  const bool tall = call.rows > call.cols;
  const int64_t n = call.shorter(), m = call.longer(), each = n * m;
  Launches launches{call.stream};
  // Results alternate between two places, and the last one is x.
  uint16_t *now = call.x, *next = room.other;
  if (call.steps % 2 != 0) std::swap(now, next);
  normalize(launches, call, room, now);
  const Factor gram = factor_of(room.gram, n, n * n, true),
               update = factor_of(room.update, n, n * n, true);
  for (int step = 0; step < call.steps; ++step, std::swap(now, next)) {
    const double* const coefficient = call.coefficients + 3 * step;
    const auto a = static_cast<float>(coefficient[0]), b = static_cast<float>(coefficient[1]),
               c = static_cast<float>(coefficient[2]);
    MuonProduct p{};
    p.count = call.count, p.rows = p.cols = n, p.symmetric = true;
    p.depth = m, p.alpha = 1.0f, p.out = room.gram;
    const Factor x = factor_of(now, call.cols, each, tall);
    multiply(launches, p, x, x);
    p.depth = n, p.alpha = c, p.beta = b, p.self = room.gram, p.out = room.update;
    multiply(launches, p, gram, gram);
    p.rows = call.rows, p.cols = call.cols, p.symmetric = false;
    p.alpha = 1.0f, p.beta = a, p.self = now, p.out = next;
    if (tall) {
      multiply(launches, p, factor_of(now, call.cols, each, false), update);
    } else {
      multiply(launches, p, update, factor_of(now, call.cols, each, true));
    }
  }
  return launches.error;
}

const char* row_moments(const CudaRowMoments& call) {
  if (const char* error = load_kernels(call.device)) return error;
  const int64_t rows = call.count * call.rows;
  Launches launches{call.stream};
  launches(muon_row_squares, ceil_div(rows, kRowWarps * kLanes), kRowWarps * kLanes,
           "summing squares of rows", call.x, call.squares, rows, call.cols);
  launches(muon_row_factors, call.count, kFactorThreads, "updating moments of rows", call.squares,
           call.moments, call.factors, call.rows, call.cols, Lerp::of(1.0 - call.beta2));
  MuonParts parts = parts_of(call.x, 1, rows * call.cols, call.x);
  parts.divisor = call.factors, parts.cols = call.cols;
  launches(muon_rows, parts.parts(), kPartThreads, "scaling rows", parts);
  return launches.error;
}

const char* product(const CudaProduct& call) {
  if (const char* error = load_kernels(call.device)) return error;
  MuonProduct p{};
  p.count = 1, p.rows = call.rows, p.cols = call.cols, p.depth = call.depth;
  p.alpha = 1.0f, p.sums = call.sums;
  Launches launches{call.stream};
  multiply(launches, p, factor_of(call.a, call.depth, 0, false),
           factor_of(call.b, call.depth, 0, false));
  return launches.error;
}

}  // namespace
}  // namespace lowbit::cuda

#define LB_EXPORT extern "C" __attribute__((visibility("default")))

LB_EXPORT const char* lowbit_cuda_newton_schulz(const lowbit::CudaNewtonSchulz* call) {
  return lowbit::cuda::newton_schulz(*call);
}
LB_EXPORT const char* lowbit_cuda_row_moments(const lowbit::CudaRowMoments* call) {
  return lowbit::cuda::row_moments(*call);
}
LB_EXPORT const char* lowbit_cuda_product(const lowbit::CudaProduct* call) {
  return lowbit::cuda::product(*call);
}
