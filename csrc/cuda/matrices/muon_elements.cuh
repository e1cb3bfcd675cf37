// What Muon's orthogonalization does besides products: the divisor of the norm
// (core/muon/newton_schulz.h) and NorMuon's rows (core/muon/row_moment.h).
#pragma once

#include "core/muon/newton_schulz.h"
#include "core/muon/row_moment.h"
#include "cuda/warp_sum.cuh"

namespace lowbit::cuda {

constexpr int kPartWarps = 8, kPartThreads = kPartWarps * kLanes;
constexpr int64_t kPartSize =
    kPartThreads * 32;  // elements of a matrix that a block of threads takes

/// Matrices of `each` elements in parts, one block of threads for each part.
struct MuonParts {
  const uint16_t* x;
  int64_t count, each;
  uint16_t* out;  // as large as x
  uint32_t* absmax;
  int64_t* words;
  const float* divisor;  // of each matrix; or of each row
  int64_t cols;

  LB_HD int64_t parts() const { return ceil_div(each, kPartSize); }
};

/// The elements [begin, end) of x that belong to a block.
struct MuonPart {
  int64_t matrix, begin, end;
};
__device__ __forceinline__ MuonPart muon_part(const MuonParts& p, int64_t number) {
  const int64_t matrix = divide(number, p.parts()), part = number - matrix * p.parts();
  const int64_t first = part * kPartSize, left = p.each - first;
  const int64_t begin = matrix * p.each + first;
  return {matrix, begin, begin + (left < kPartSize ? left : kPartSize)};
}

__global__ void __launch_bounds__(kPartThreads) muon_absmax(LB_ARGUMENT(MuonParts) p) {
  const int thread = static_cast<int>(threadIdx.x);
  const MuonPart part = muon_part(p, blockIdx.x);
  uint32_t mine = 0;
  LB_UNROLL(4)
  for (int64_t e = part.begin + thread; e < part.end; e += kPartThreads) {
    const uint32_t magnitude = static_cast<uint32_t>(p.x[e] & 0x7fffu) << 16;
    mine = magnitude > mine ? magnitude : mine;
  }
  mine = __reduce_max_sync(kAllLanes, mine);
  if (thread % kLanes == 0 && mine != 0) atomicMax(p.absmax + part.matrix, mine);
}

struct MuonSquares {
  WarpSum warp[kPartWarps];
};

/// The squares of the elements by norm_exponent of their absmax.
__global__ void __launch_bounds__(kPartThreads) muon_squares(LB_ARGUMENT(MuonParts) p) {
  LB_SHARED(MuonSquares, shared);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes, warp = thread / kLanes;
  const MuonPart part = muon_part(p, blockIdx.x);
  const float factor = static_cast<float>(power_of_two(-norm_exponent(p.absmax[part.matrix])));
  WarpSum& sum = shared.warp[warp];
  sum.clear(lane);
  LB_UNROLL(1)
  for (int64_t at = part.begin + warp * kTile; at < part.end; at += kPartWarps * kTile) {
    const int n = static_cast<int>(part.end - at < kTile ? part.end - at : kTile);
    LB_UNROLL(8)
    for (int e = lane; e < n; e += kLanes) {
      const float x = bfloat16_to_float(p.x[at + e]) * factor;
      sum.x[e] = x * x;
    }
    sum.add(n, lane);
  }
  sum.flush(p.words + part.matrix * ExactSum::kWords, lane);
}

constexpr int kDivisors = 64;
struct MuonDigits {
  int64_t digit[kDivisors][ExactSum::kWords];
};

/// What each matrix is divided by, one thread for each.
__global__ void __launch_bounds__(kDivisors)
    muon_divisors(const int64_t* words, const uint32_t* absmax, float* divisor, const int64_t count,
                  const double factor, const double eps) {
  LB_SHARED(MuonDigits, shared);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kDivisors + thread;
  if (i >= count) return;
  // NaN where a value is not finite: the sum of its square is.
  const double squares = exact_value(words + i * ExactSum::kWords, shared.digit[thread]);
  divisor[i] = norm_divisor(squares, norm_exponent(absmax[i]), factor, eps);
}

__global__ void __launch_bounds__(kPartThreads) muon_divide(LB_ARGUMENT(MuonParts) p) {
  const int thread = static_cast<int>(threadIdx.x);
  const MuonPart part = muon_part(p, blockIdx.x);
  const float divisor = p.divisor[part.matrix];
  LB_UNROLL(4)
  for (int64_t e = part.begin + thread; e < part.end; e += kPartThreads)
    p.out[e] = orthogonal_value(bfloat16_to_float(p.x[e]) / divisor);
}

// ---- NorMuon ----

constexpr int kRowWarps = 4;
struct RowShared {
  uint16_t x[kRowWarps][kLanes][kLanes + 2];  // an odd number of words: one row for each bank
};

/// The squares of each row as row_squares adds them: one lane for each row.
__global__ void __launch_bounds__(kRowWarps* kLanes)
    muon_row_squares(const uint16_t* x, double* squares, const int64_t rows, const int64_t cols) {
  LB_SHARED(RowShared, shared);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  const int64_t first = warp_number<kRowWarps>(thread) * kLanes;
  const int here = static_cast<int>(rows - first < kLanes ? rows - first : kLanes);
  auto& tile = shared.x[thread / kLanes];
  double sum = 0.0;
  LB_UNROLL(1)
  for (int64_t col = 0; col < cols; col += kLanes) {
    const int deep = static_cast<int>(cols - col < kLanes ? cols - col : kLanes);
    __syncwarp();  // no lane still reads the previous columns
    LB_UNROLL(4)
    for (int r = 0; r < here; ++r) {
      if (lane < deep) tile[r][lane] = x[(first + r) * cols + col + lane];
    }
    __syncwarp();
    if (lane >= here) continue;
    LB_UNROLL(4)
    for (int k = 0; k < deep; ++k) {
      const double value = bfloat16_to_float(tile[lane][k]);
      sum = sum + value * value;
    }
  }
  if (lane < here) squares[first + lane] = sum;
}

constexpr int kFactorThreads = 256;
struct FactorShared {
  double before[kFactorThreads], after[kFactorThreads];
  double rescale;
};

/// The moments of the rows, and what each row is multiplied by: one block of threads for each
/// matrix.
__global__ void __launch_bounds__(kFactorThreads)
    muon_row_factors(const double* squares, float* moments, float* factors, const int64_t rows,
                     const int64_t cols, const Lerp average) {
  LB_SHARED(FactorShared, shared);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * rows, end = begin + rows;
  double before = 0.0, after = 0.0;
  LB_UNROLL(1)
  for (int64_t at = begin; at < end; at += kFactorThreads) {
    const int here = static_cast<int>(end - at < kFactorThreads ? end - at : kFactorThreads);
    __syncthreads();  // the first thread has added the previous rows
    if (thread < here) {
      const double of_row = squares[at + thread];
      const float moment = row_moment(moments[at + thread], of_row, cols, average);
      const double scale = row_scale(moment);
      moments[at + thread] = moment;
      shared.before[thread] = of_row;
      shared.after[thread] = scale * scale * of_row;
    }
    __syncthreads();
    if (thread != 0) continue;
    LB_UNROLL(4)
    for (int r = 0; r < here; ++r) {
      before = before + shared.before[r];
      after = after + shared.after[r];
    }
  }
  if (thread == 0) shared.rescale = row_rescale(before, after);
  __syncthreads();
  const double rescale = shared.rescale;
  LB_UNROLL(1)
  for (int64_t r = begin + thread; r < end; r += kFactorThreads)
    factors[r] = static_cast<float>(row_scale(moments[r]) * rescale);
}

/// Multiplies each row by its factor, p.divisor.
__global__ void __launch_bounds__(kPartThreads) muon_rows(LB_ARGUMENT(MuonParts) p) {
  const int thread = static_cast<int>(threadIdx.x);
  const MuonPart part = muon_part(p, blockIdx.x);
  LB_UNROLL(1)
  for (int64_t e = part.begin + thread; e < part.end; e += kPartThreads)
    p.out[e] = row_value(p.x[e], p.divisor[divide(e, p.cols)]);
}

}  // namespace lowbit::cuda
