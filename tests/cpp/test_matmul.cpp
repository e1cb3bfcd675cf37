// Products of bfloat16 matrices and the Newton-Schulz steps of Muon, against plain loops, on every
// instruction set and with several threads.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/muon/newton_schulz.h"
#include "cpu/matrices/matmul.h"
#include "cpu/matrices/row_moment.h"
#include "cpu/step.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using namespace lowbit;
using Matrix = std::vector<uint16_t>;

std::mt19937 random_engine(20241208);

/// Values whose exponents differ by up to `span`.
Matrix drawn(int64_t rows, int64_t cols, unsigned span) {
  Matrix made(static_cast<size_t>(rows * cols));
  for (uint16_t& x : made) {
    const unsigned bits = static_cast<unsigned>(random_engine()), exponent = 127 - bits % span;
    x = static_cast<uint16_t>((bits >> 16 & 0x807f) | exponent << 7);
  }
  return made;
}

/// All at once, each thread a part, or one part after the other.
void three_threads(int64_t count, const cpu::Body& body) {
  std::vector<std::thread> running;
  const int64_t part = (count + 2) / 3;
  for (int64_t at = 0; at < count; at += part)
    running.emplace_back([&body, at, end = std::min(count, at + part)] { body(at, end); });
  for (std::thread& thread : running) thread.join();
}
void one_by_one(int64_t count, const cpu::Body& body) {
  for (int64_t i = 0; i < count; ++i) body(i, i + 1);
}

// The reference: what core/muon/newton_schulz.h says, in its words.

float chain(const Matrix& a, int64_t a_row, int64_t a_step, const Matrix& b, int64_t b_at,
            int64_t b_step, int64_t depth) {
  float sum = 0.0f;
  for (int64_t k = 0; k < depth; ++k) {
    sum = sum + bfloat16_to_float(a[static_cast<size_t>(a_row + k * a_step)]) *
                    bfloat16_to_float(b[static_cast<size_t>(b_at + k * b_step)]);
  }
  return sum;
}

Matrix transposed(const Matrix& x, int64_t rows, int64_t cols) {
  Matrix out(x.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j)
      out[static_cast<size_t>(j * rows + i)] = x[static_cast<size_t>(i * cols + j)];
  }
  return out;
}

Matrix slow_newton_schulz(Matrix x, int64_t rows, int64_t cols, const std::vector<double>& steps,
                          double factor, double eps) {
  if (rows > cols)
    return transposed(slow_newton_schulz(transposed(x, rows, cols), cols, rows, steps, factor, eps),
                      cols, rows);
  uint32_t largest = 0;
  for (const uint16_t v : x) largest = std::max(largest, magnitude_bits(bfloat16_to_float(v)));
  float divisor = NAN;
  if (largest < kInfinityBits) {
    const int e = norm_exponent(largest);
    int64_t words[ExactSum::kWords] = {};
    for (const uint16_t v : x) {
      const float scaled = std::ldexp(bfloat16_to_float(v), -e);
      exact_add(scaled * scaled, words);
      exact_carry(words);
    }
    divisor = norm_divisor(exact_value(words), e, factor, eps);
  }
  for (uint16_t& v : x) v = orthogonal_value(bfloat16_to_float(v) / divisor);
  for (size_t s = 0; s < steps.size(); s += 3) {
    const auto a = static_cast<float>(steps[s]), b = static_cast<float>(steps[s + 1]),
               c = static_cast<float>(steps[s + 2]);
    Matrix gram(static_cast<size_t>(rows * rows)), update(gram), next(x);
    for (int64_t i = 0; i < rows * rows; ++i) {
      gram[static_cast<size_t>(i)] =
          orthogonal_value(chain(x, i / rows * cols, 1, x, i % rows * cols, 1, cols));
    }
    for (int64_t i = 0; i < rows * rows; ++i) {
      update[static_cast<size_t>(i)] =
          product_value(chain(gram, i / rows * rows, 1, gram, i % rows, rows, rows),
                        gram[static_cast<size_t>(i)], c, b);
    }
    for (int64_t i = 0; i < rows * cols; ++i) {
      next[static_cast<size_t>(i)] =
          product_value(chain(update, i / cols * rows, 1, x, i % cols, cols, rows),
                        x[static_cast<size_t>(i)], 1.0f, a);
    }
    x = next;
  }
  return x;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void check_products(const std::string& isa) {
  random_engine.seed(1);
  const int64_t shapes[][3] = {{1, 1, 1},    {6, 16, 256},   {7, 17, 257},
                               {5, 33, 3},   {191, 49, 300}, {193, 9, 2},
                               {40, 771, 9}, {200, 800, 5},  {33, 13, 1025}};
  for (const auto& [rows, cols, depth] : shapes) {
    const Matrix a = drawn(rows, depth, 12), b = drawn(cols, depth, 12);
    const Matrix straight = transposed(b, cols, depth);
    std::vector<float> expected(static_cast<size_t>(rows * cols)),
        square(static_cast<size_t>(rows * rows));
    for (int64_t i = 0; i < rows * cols; ++i)
      expected[static_cast<size_t>(i)] =
          chain(a, i / cols * depth, 1, b, i % cols * depth, 1, depth);
    for (int64_t i = 0; i < rows * rows; ++i)
      square[static_cast<size_t>(i)] = chain(a, i / rows * depth, 1, a, i % rows * depth, 1, depth);
    const std::string what = isa + ": " + std::to_string(rows) + " x " + std::to_string(cols) +
                             " x " + std::to_string(depth);
    const cpu::Parallel ways[] = {cpu::one_thread, three_threads, one_by_one};
    for (const cpu::Parallel& parallel : ways) {
      std::vector<float> out(expected.size(), NAN);
      cpu::multiply({rows,
                     cols,
                     depth,
                     {a.data(), depth},
                     {b.data(), depth},
                     true,
                     false,
                     false,
                     nullptr,
                     1.0f,
                     0.0f,
                     nullptr,
                     out.data()},
                    parallel);
      check(same(out, expected), what + ", a b^T");
      std::fill(out.begin(), out.end(), NAN);
      cpu::multiply({rows,
                     cols,
                     depth,
                     {a.data(), depth},
                     {straight.data(), cols},
                     false,
                     false,
                     false,
                     nullptr,
                     1.0f,
                     0.0f,
                     nullptr,
                     out.data()},
                    parallel);
      check(same(out, expected), what + ", a b");
      std::vector<float> gram(square.size(), NAN);
      cpu::multiply({rows,
                     rows,
                     depth,
                     {a.data(), depth},
                     {a.data(), depth},
                     true,
                     false,
                     true,
                     nullptr,
                     1.0f,
                     0.0f,
                     nullptr,
                     gram.data()},
                    parallel);
      check(same(gram, square), what + ", a a^T");
    }
  }
}

const std::vector<double> kQuintic = {3.4445, -4.7750, 2.0315,  3.4445, -4.7750,
                                      2.0315, 3.4445,  -4.7750, 2.0315};

Matrix orthogonal(Matrix x, int64_t rows, int64_t cols, const std::vector<double>& steps,
                  double factor, const cpu::Parallel& parallel) {
  const cpu::NewtonSchulz how{steps.data(), static_cast<int>(steps.size() / 3), factor, 1e-7};
  cpu::newton_schulz(how, x.data(), rows, cols, x.data(), parallel);
  return x;
}

void check_newton_schulz(const std::string& isa) {
  random_engine.seed(2);
  const int64_t shapes[][2] = {{1, 1},    {1, 40},   {40, 1},   {16, 16},  {77, 100},
                               {100, 77}, {50, 300}, {201, 40}, {200, 210}};
  for (const auto& [rows, cols] : shapes) {
    for (const unsigned span : {4u, 120u}) {  // of 120: values that vanish, as their products would
      const Matrix x = drawn(rows, cols, span);
      const Matrix expected = slow_newton_schulz(x, rows, cols, kQuintic, 1.02, 1e-7);
      const std::string what = isa + ": Newton-Schulz " + std::to_string(rows) + " x " +
                               std::to_string(cols) + ", span " + std::to_string(span);
      check(orthogonal(x, rows, cols, kQuintic, 1.02, cpu::one_thread) == expected, what);
      check(orthogonal(x, rows, cols, kQuintic, 1.02, three_threads) == expected,
            what + ", threads");
      const Matrix turned =
          orthogonal(transposed(x, rows, cols), cols, rows, kQuintic, 1.02, cpu::one_thread);
      check(rows == cols || turned == transposed(expected, rows, cols), what + ", transposed");
#if defined(__x86_64__)
      const unsigned before = _mm_getcsr();
      _mm_setcsr(before | 0x8040);  // subnormal numbers become zero
      const Matrix flushed = orthogonal(x, rows, cols, kQuintic, 1.02, cpu::one_thread);
      _mm_setcsr(before);
      check(flushed == expected, what + ", subnormals flushed");
#endif
    }
  }
}

/// Singular values near 1, whatever the size of the input; and what is not a number stays so.
void check_meaning(const std::string& isa) {
  random_engine.seed(3);
  const int64_t rows = 20, cols = 60;
  std::vector<double> five;
  for (int i = 0; i < 6; ++i) five.insert(five.end(), {1.875, -1.25, 0.375});
  Matrix x = drawn(rows, cols, 3);
  const Matrix expected = orthogonal(x, rows, cols, five, 1.0, cpu::one_thread);
  for (int64_t i = 0; i < rows; ++i) {
    const float norm = chain(expected, i * cols, 1, expected, i * cols, 1, cols);
    check(std::fabs(norm - 1.0f) < 0.1f, isa + ": a row of length " + std::to_string(norm));
  }
  for (const int shift : {-100, 100}) {  // squares that underflow and overflow
    Matrix moved = x;
    for (uint16_t& v : moved)
      v = bfloat16_nearest(std::ldexp(bfloat16_to_float(v), shift > 0 ? shift : -20));
    check(orthogonal(moved, rows, cols, five, 1.0, cpu::one_thread) == expected,
          isa + ": the size of the input, 2^" + std::to_string(shift));
  }
  const Matrix zero(static_cast<size_t>(rows * cols), 0);
  check(orthogonal(zero, rows, cols, five, 1.0, cpu::one_thread) == zero,
        isa + ": zero stays zero");
  for (const uint16_t bad : {uint16_t{0x7f80}, uint16_t{0xff80}, uint16_t{0x7fc1}}) {
    Matrix with = x;
    with[7] = bad;
    const Matrix out = orthogonal(with, rows, cols, five, 1.0, cpu::one_thread);
    check(out == Matrix(out.size(), 0x7fc0), isa + ": all is NaN where one is not finite");
  }
}

/// A digest of a matrix and of the moments of its rows, orthogonalized and evened out, for each
/// shape: to compare processors by.
void print_bits() {
  random_engine.seed(4);
  const int64_t shapes[][2] = {{77, 300}, {300, 77}, {64, 512}, {129, 130}, {1, 40}};
  for (const auto& [rows, cols] : shapes) {
    Matrix x = orthogonal(drawn(rows, cols, 30), rows, cols, kQuintic, 1.0, three_threads);
    uint64_t digest = 0xcbf29ce484222325u;
    const auto add = [&digest](const void* data, size_t size) {
      for (size_t i = 0; i < size; ++i)
        digest = (digest ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
    };
    add(x.data(), x.size() * sizeof(uint16_t));
    std::vector<float> moments(static_cast<size_t>(rows), 0.25f);
    cpu::normalize_rows(x.data(), moments.data(), 1, rows, cols, 0.9, three_threads);
    add(x.data(), x.size() * sizeof(uint16_t));
    add(moments.data(), moments.size() * sizeof(float));
    std::printf("%lld x %lld %016llx\n", static_cast<long long>(rows), static_cast<long long>(cols),
                static_cast<unsigned long long>(digest));
  }
}

}  // namespace

int main(int count, char**) {
  if (count > 1) {  // "bits"
    print_bits();
    return 0;
  }
  const std::string names = cpu::usable_isas();
  for (size_t at = 0; at < names.size();) {
    const size_t end = std::min(names.find(' ', at), names.size());
    const std::string name = names.substr(at, end - at);
    check(cpu::set_isa(name.c_str()) && name.starts_with(cpu::matmul_kernels().isa),
          "the kernels of " + name);
    check_products(name);
    check_newton_schulz(name);
    check_meaning(name);
    at = end + 1;
  }
  return finish();
}
