// Compares Muon's orthogonalization of the CUDA library in the emulator with that of the CPU, bit
// for bit. Include after cuda_emulator.h and cuda/matrices/muon.cu.
#pragma once

#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/matrices/matmul.h"
#include "cpu/matrices/row_moment.h"
#include "cuda_sample.h"

namespace lowbit {
namespace {

/// A batch of matrices. span: how far exponents are apart. odd: a value at the end of the first
/// matrix, such as one that is not finite. offset: of the first value from one that is aligned.
struct MuonSpec {
  int64_t count, rows, cols;
  int steps = 2;
  unsigned span = 6;
  int shift = 0;  // of all exponents
  uint16_t odd = 0;
  int64_t offset = 0;
  double factor = 1.0, eps = 1e-7;

  int64_t each() const { return rows * cols; }
  std::string name() const {
    return std::to_string(count) + " x " + std::to_string(rows) + " x " + std::to_string(cols) +
           ", " + std::to_string(steps) + " steps, span " + std::to_string(span) + ", shift " +
           std::to_string(shift) + ", offset " + std::to_string(offset);
  }
};

std::mt19937 engine(17);

std::vector<uint16_t> drawn_matrices(const MuonSpec& spec) {
  std::vector<uint16_t> made(static_cast<size_t>(spec.count * spec.each()));
  for (uint16_t& x : made) {
    const unsigned bits = static_cast<unsigned>(engine());
    const auto exponent = static_cast<unsigned>(127 + spec.shift) - bits % spec.span;
    x = static_cast<uint16_t>((bits >> 16 & 0x807f) | exponent << 7);
  }
  if (spec.odd != 0) made[static_cast<size_t>(spec.each() - 1)] = spec.odd;
  return made;
}

/// What the emulated device has, from an aligned address on, between values that must stay.
class Buffer {
 public:
  Buffer(const std::vector<uint16_t>& values, int64_t offset)
      : values_(values.size() + kAround, kGuard), begin_(8 + static_cast<size_t>(offset)) {
    while (reinterpret_cast<uintptr_t>(values_.data() + begin_ - static_cast<size_t>(offset)) % 16)
      ++begin_;
    std::copy(values.begin(), values.end(), values_.begin() + static_cast<int64_t>(begin_));
    size_ = values.size();
  }
  uint16_t* at() { return values_.data() + begin_; }
  bool holds(const std::vector<uint16_t>& values) const {
    for (size_t i = 0; i < values_.size(); ++i) {
      const bool inside = i >= begin_ && i < begin_ + size_;
      if (values_[i] != (inside ? values[i - begin_] : kGuard)) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kAround = 40;
  static constexpr uint16_t kGuard = 0x5a5a;
  std::vector<uint16_t> values_;
  size_t begin_, size_ = 0;
};

const std::vector<double>& coefficients_of(int steps) {
  static std::vector<double> all;
  all.clear();
  for (int i = 0; i < steps; ++i) {
    for (const double c : {3.4445 - 0.1 * i, -4.7750, 2.0315 + 0.05 * i}) all.push_back(c);
  }
  return all;
}

bool newton_schulz_differs(const MuonSpec& spec) {
  const std::vector<double>& coefficients = coefficients_of(spec.steps);
  std::vector<uint16_t> expected = drawn_matrices(spec);
  Buffer x(expected, spec.offset);
  const cpu::NewtonSchulz how{coefficients.data(), spec.steps, spec.factor, spec.eps};
  for (int64_t i = 0; i < spec.count; ++i) {
    uint16_t* const at = expected.data() + i * spec.each();
    cpu::newton_schulz(how, at, spec.rows, spec.cols, at, cpu::one_thread);
  }
  CudaNewtonSchulz call{};
  call.x = x.at();
  call.count = spec.count, call.rows = spec.rows, call.cols = spec.cols;
  call.coefficients = coefficients.data(), call.steps = spec.steps;
  call.factor = spec.factor, call.eps = spec.eps;
  std::vector<char> room(static_cast<size_t>(NewtonSchulzRoom(call).bytes) + 256, '\xff');
  call.workspace =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(room.data()) + 255) & ~uintptr_t{255});
  return lowbit_cuda_newton_schulz(&call) != nullptr || !x.holds(expected);
}

bool rows_differ(const MuonSpec& spec) {
  std::vector<uint16_t> expected = drawn_matrices(spec);
  Buffer x(expected, spec.offset);
  std::vector<float> moments(static_cast<size_t>(spec.count * spec.rows));
  for (float& m : moments) m = static_cast<float>(engine() % 1000) * 1e-3f;
  std::vector<float> found = moments;
  const double beta2 = spec.rows % 2 ? 0.95 : 0.3;  // both sides of the average
  cpu::normalize_rows(expected.data(), moments.data(), spec.count, spec.rows, spec.cols, beta2,
                      cpu::one_thread);
  std::vector<double> squares(moments.size());
  std::vector<float> factors(moments.size());
  CudaRowMoments call{};
  call.x = x.at(), call.moments = found.data();
  call.count = spec.count, call.rows = spec.rows, call.cols = spec.cols, call.beta2 = beta2;
  call.squares = squares.data(), call.factors = factors.data();
  return lowbit_cuda_row_moments(&call) != nullptr || !x.holds(expected) ||
         std::memcmp(found.data(), moments.data(), moments.size() * sizeof(float)) != 0;
}

/// a b^T of matrices with `count` and `rows` rows of `cols` values.
bool product_differs(const MuonSpec& spec) {
  MuonSpec left = spec, right = spec;
  left.rows = spec.count, left.count = right.count = 1;
  const std::vector<uint16_t> a = drawn_matrices(left), b = drawn_matrices(right);
  std::vector<float> expected(static_cast<size_t>(left.rows * right.rows)), sums(expected);
  cpu::Product product{};
  product.rows = left.rows, product.cols = right.rows, product.depth = spec.cols;
  product.a = {a.data(), spec.cols}, product.b = {b.data(), spec.cols};
  product.b_transposed = true, product.sums = expected.data();
  cpu::multiply(product, cpu::one_thread);
  Buffer x(a, spec.offset), y(b, 0);
  CudaProduct call{};
  call.a = x.at(), call.b = y.at(), call.sums = sums.data();
  call.rows = left.rows, call.cols = right.rows, call.depth = spec.cols;
  return lowbit_cuda_product(&call) != nullptr ||
         std::memcmp(sums.data(), expected.data(), sums.size() * sizeof(float)) != 0;
}

/// How many batches differ; the first is printed.
template <class Differs>
int muon_differ(const std::vector<MuonSpec>& specs, const Differs& differs) {
  static Sample sample;
  int count = 0;
  std::string first;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!sample(i, specs.size())) continue;
    if (!differs(specs[i])) continue;
    if (count++ == 0) first = specs[i].name();
  }
  if (count > 0) std::fprintf(stderr, "first differs: %s\n", first.c_str());
  sample.report(specs.size(), count, first);
  return count;
}

}  // namespace
}  // namespace lowbit
