// Included once by each matmul_ISA.cpp, which defines LOWBIT_MATMUL, the name of the table, and LOWBIT_ISA.
#include "core/muon/newton_schulz.h"
#include "cpu/matrices/matmul_kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace lowbit::cpu {
namespace {

using K = MatmulKernels;

// The product of two widened bfloat16 numbers is exact, so a fused multiply-add gives the same result as a
// product and a sum. Accumulators, a row of b and one element of a fill the registers.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 2, kTall = 12;
using Floats = __m512;
LB_HD Floats load(const float* x) { return _mm512_loadu_ps(x); }
LB_HD Floats same(float x) { return _mm512_set1_ps(x); }
LB_HD void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
LB_HD Floats exact_product_sum(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__)
constexpr int kLanes = 8, kVectors = 2, kTall = 6;
using Floats = __m256;
LB_HD Floats load(const float* x) { return _mm256_loadu_ps(x); }
LB_HD Floats same(float x) { return _mm256_set1_ps(x); }
LB_HD void store(float* to, Floats x) { _mm256_storeu_ps(to, x); }
LB_HD Floats exact_product_sum(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
#else
constexpr int kLanes = 4, kVectors = 2, kTall = 4;
using Floats = float __attribute__((vector_size(16)));
LB_HD Floats load(const float* x) {
  Floats y;
  __builtin_memcpy(&y, x, sizeof y);
  return y;
}
LB_HD Floats same(float x) { return Floats{x, x, x, x}; }
LB_HD void store(float* to, Floats x) { __builtin_memcpy(to, &x, sizeof x); }
LB_HD Floats exact_product_sum(Floats a, Floats b, Floats c) { return a * b + c; }
#endif
constexpr int kWide = kVectors * kLanes;
static_assert(kTall <= K::kMaxRows && kWide <= K::kMaxWidth);

void tile(const float* a, const float* b, float* sum, int64_t stride, int depth, bool first) {
  Floats acc[kTall][kVectors];
  for (int i = 0; i < kTall; ++i) {
    for (int j = 0; j < kVectors; ++j)
      acc[i][j] = first ? same(0.0f) : load(sum + i * stride + j * kLanes);
  }
  for (int k = 0; k < depth; ++k) {
    Floats row[kVectors];
    for (int j = 0; j < kVectors; ++j) row[j] = load(b + k * kWide + j * kLanes);
    for (int i = 0; i < kTall; ++i) {
      const Floats x = same(a[k * kTall + i]);
      for (int j = 0; j < kVectors; ++j) acc[i][j] = exact_product_sum(x, row[j], acc[i][j]);
    }
  }
  for (int i = 0; i < kTall; ++i) {
    for (int j = 0; j < kVectors; ++j) store(sum + i * stride + j * kLanes, acc[i][j]);
  }
}

void pack_rows(const uint16_t* x, int64_t stride, int n, int group, int depth, float* out) {
  for (int i = 0; i < n; ++i) {
    const uint16_t* const from = x + i * stride;
    for (int k = 0; k < depth; ++k) out[k * group + i] = bfloat16_to_float(from[k]);
  }
  for (int k = 0; n < group && k < depth; ++k) {
    for (int i = n; i < group; ++i) out[k * group + i] = 0.0f;
  }
}

/// pack_columns of a whole group whose size the compiler knows.
template <int kGroup>
LB_HD void pack_group(const uint16_t* x, int64_t stride, int depth, float* out) {
  for (int k = 0; k < depth; ++k) {
    for (int i = 0; i < kGroup; ++i) out[k * kGroup + i] = bfloat16_to_float(x[k * stride + i]);
  }
}

void pack_columns(const uint16_t* x, int64_t stride, int n, int group, int depth, float* out) {
  if (n == kWide && group == kWide) return pack_group<kWide>(x, stride, depth, out);
  if (n == kTall && group == kTall) return pack_group<kTall>(x, stride, depth, out);
  for (int k = 0; k < depth; ++k) {
    for (int i = 0; i < group; ++i)
      out[k * group + i] = i < n ? bfloat16_to_float(x[k * stride + i]) : 0.0f;
  }
}

void finish(const float* sum, const uint16_t* self, float alpha, float beta, uint16_t* out,
            int64_t n) {
  if (self == nullptr) {
    for (int64_t i = 0; i < n; ++i) out[i] = orthogonal_value(alpha * sum[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = product_value(sum[i], self[i], alpha, beta);
  }
}

void divide(const uint16_t* x, float divisor, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = orthogonal_value(bfloat16_to_float(x[i]) / divisor);
}

uint32_t absmax(const uint16_t* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = static_cast<uint32_t>(x[i] & 0x7fffu) << 16;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

void add_squares(const uint16_t* x, float factor, int64_t n, int64_t* words) {
  constexpr int kPart = 512;
  float part[kPart];
  for (int64_t at = 0; at < n; at += kPart) {
    const int count = static_cast<int>(n - at < kPart ? n - at : kPart);
    for (int i = 0; i < count; ++i) part[i] = bfloat16_to_float(x[at + i]) * factor;
    exact_add_squares(part, count, words);
  }
}

}  // namespace

const MatmulKernels LOWBIT_MATMUL = {LOWBIT_ISA,   kTall,  kWide,  tile,   pack_rows,
                                     pack_columns, finish, divide, absmax, add_squares};

}  // namespace lowbit::cpu
