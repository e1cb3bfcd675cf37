// A register of terms of an exact sum (exact_sum.h, column_sums.h): which of them a sum takes, and
// their addition in double.
#pragma once

#include <cstdint>

#include "core/macros.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace lowbit {

#if defined(__AVX512F__)
struct SumVector {
  static constexpr int kLanes = 16;
  using Bits = __m512i;
  using Mask = __mmask16;
  struct Sums {
    __m512d low, high;
  };
  LB_HD static Bits load(const float* x) { return _mm512_loadu_si512(x); }
  LB_HD static Bits all(int32_t x) { return _mm512_set1_epi32(x); }
  LB_HD static Bits magnitude(Bits x) { return _mm512_and_si512(x, all(0x7fffffff)); }
  LB_HD static Bits max(Bits a, Bits b) { return _mm512_max_epi32(a, b); }
  LB_HD static int32_t largest(Bits x) { return _mm512_reduce_max_epi32(x); }
  /// What magnitudes from `lower` on are greater than.
  LB_HD static Bits before(int32_t lower) { return all(lower - 1); }
  LB_HD static Mask greater(Bits a, Bits b) { return _mm512_cmpgt_epi32_mask(a, b); }
  LB_HD static Mask both(Mask a, Mask b) { return _kand_mask16(a, b); }
  LB_HD static Mask without(Mask a, Mask b) { return _kandn_mask16(b, a); }
  /// all | (x where the mask is not set)
  LB_HD static Bits join_others(Bits all, Mask where, Bits x) {
    return _mm512_mask_or_epi32(all, _knot_mask16(where), all, x);
  }
  LB_HD static void load(const double* x, Sums& sums) {
    sums = {_mm512_loadu_pd(x), _mm512_loadu_pd(x + 8)};
  }
  LB_HD static void store(const Sums& sums, double* x) {
    _mm512_storeu_pd(x, sums.low), _mm512_storeu_pd(x + 8, sums.high);
  }
  LB_HD static void add(Sums& sums, Bits x, Mask where) {
    const __m512d low = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_castsi512_si256(x)));
    const __m512d high = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_extracti64x4_epi64(x, 1)));
    sums.low = _mm512_mask_add_pd(sums.low, static_cast<__mmask8>(where), sums.low, low);
    sums.high = _mm512_mask_add_pd(sums.high, static_cast<__mmask8>(where >> 8), sums.high, high);
  }
  LB_HD static double total(const Sums& sums) {
    return _mm512_reduce_add_pd(_mm512_add_pd(sums.low, sums.high));
  }
};
#elif defined(__AVX2__)
struct SumVector {
  static constexpr int kLanes = 8;
  using Bits = __m256i;
  using Mask = __m256i;
  struct Sums {
    __m256d low, high;
  };
  LB_HD static Bits load(const float* x) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  }
  LB_HD static Bits all(int32_t x) { return _mm256_set1_epi32(x); }
  LB_HD static Bits magnitude(Bits x) { return _mm256_and_si256(x, all(0x7fffffff)); }
  LB_HD static Bits max(Bits a, Bits b) { return _mm256_max_epi32(a, b); }
  LB_HD static int32_t largest(Bits x) {
    const __m128i a = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    const __m128i b = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0x4E));
    return _mm_cvtsi128_si32(_mm_max_epi32(b, _mm_shuffle_epi32(b, 0xB1)));
  }
  LB_HD static Bits before(int32_t lower) { return all(lower - 1); }
  LB_HD static Mask greater(Bits a, Bits b) { return _mm256_cmpgt_epi32(a, b); }
  LB_HD static Mask both(Mask a, Mask b) { return _mm256_and_si256(a, b); }
  LB_HD static Mask without(Mask a, Mask b) { return _mm256_andnot_si256(b, a); }
  LB_HD static Bits join_others(Bits all, Mask where, Bits x) {
    return _mm256_or_si256(all, _mm256_andnot_si256(where, x));
  }
  LB_HD static void load(const double* x, Sums& sums) {
    sums = {_mm256_loadu_pd(x), _mm256_loadu_pd(x + 4)};
  }
  LB_HD static void store(const Sums& sums, double* x) {
    _mm256_storeu_pd(x, sums.low), _mm256_storeu_pd(x + 4, sums.high);
  }
  LB_HD static void add(Sums& sums, Bits x, Mask where) {
    const __m256 taken = _mm256_castsi256_ps(_mm256_and_si256(x, where));
    sums.low = _mm256_add_pd(sums.low, _mm256_cvtps_pd(_mm256_castps256_ps128(taken)));
    sums.high = _mm256_add_pd(sums.high, _mm256_cvtps_pd(_mm256_extractf128_ps(taken, 1)));
  }
  LB_HD static double total(const Sums& sums) {
    const __m256d a = _mm256_add_pd(sums.low, sums.high);
    const __m128d b = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_add_pd(b, _mm_unpackhi_pd(b, b)));
  }
};
#else
struct SumVector {
  static constexpr int kLanes = 4;  // compilers split vectors where registers are shorter
  using Bits = int32_t __attribute__((vector_size(16)));
  using Mask = Bits;
  using Sums = double __attribute__((vector_size(32)));
  LB_HD static Bits load(const float* x) {
    Bits bits;
    __builtin_memcpy(&bits, x, sizeof bits);
    return bits;
  }
  LB_HD static Bits all(int32_t x) { return Bits{x, x, x, x}; }
  LB_HD static Bits magnitude(Bits x) { return x & 0x7fffffff; }
  LB_HD static Bits max(Bits a, Bits b) { return a > b ? a : b; }
  LB_HD static int32_t largest(Bits x) {
    int32_t most = x[0];
    for (int j = 1; j < kLanes; ++j) most = x[j] > most ? x[j] : most;
    return most;
  }
  LB_HD static Bits before(int32_t lower) { return all(lower - 1); }
  LB_HD static Mask greater(Bits a, Bits b) { return a > b; }
  LB_HD static Mask both(Mask a, Mask b) { return a & b; }
  LB_HD static Mask without(Mask a, Mask b) { return a & ~b; }
  LB_HD static Bits join_others(Bits all, Mask where, Bits x) { return all | (x & ~where); }
  LB_HD static void load(const double* x, Sums& sums) { __builtin_memcpy(&sums, x, sizeof sums); }
  LB_HD static void store(const Sums& sums, double* x) { __builtin_memcpy(x, &sums, sizeof sums); }
  LB_HD static void add(Sums& sums, Bits x, Mask where) {
    using Floats = float __attribute__((vector_size(16)));
    sums += __builtin_convertvector((Floats)(x & where), Sums);
  }
  LB_HD static double total(const Sums& sums) {
    double sum = 0.0;
    for (int j = 0; j < kLanes; ++j) sum += sums[j];
    return sum;
  }
};
#endif

}  // namespace lowbit
