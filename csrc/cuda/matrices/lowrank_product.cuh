// Products of float32 matrices in the order of cpu/matrices/product.h: terms exact in double, added
// in ascending order of the index and rounded to float32 once. One thread computes each sum.
#pragma once

#include "cuda/matrices/lowrank_elements.cuh"

namespace lowbit::cuda {

// ---- L of a tall matrix with few sums per row: one lane per row ----

constexpr int kNarrowRank = 8, kNarrowWarps = 4;

LB_HD int64_t narrow_units(const LowRankJob& job) {
  return job.tall && job.rank <= kNarrowRank ? ceil_div(job.rows, kLanes) : 0;
}
struct NarrowShared {
  double p[kNarrowWarps][kLanes * kNarrowRank];
  float g[kNarrowWarps][kLanes][kLanes + 1];  // one row per bank
};

/// Computes rows [first, first + 32) of L.
template <int kRank>
__device__ __forceinline__ void narrow_rows(const LowRankJob& job, double* p,
                                            float (*g)[kLanes + 1], int64_t first, int lane) {
  const int rows = static_cast<int>(job.rows - first < kLanes ? job.rows - first : kLanes);
  const int rank = static_cast<int>(job.rank);
  double sum[kRank] = {};
  LB_UNROLL(1)
  for (int64_t col = 0; col < job.cols; col += kLanes) {
    const int deep = static_cast<int>(job.cols - col < kLanes ? job.cols - col : kLanes);
    __syncwarp();  // no lane still reads the previous columns
    visit(job.grad_format, GradFormats{}, [&](auto format) {
      LB_UNROLL(8)
      for (int i = 0; i < rows; ++i) {
        if (lane < deep)
          g[i][lane] = grad_at<decltype(format)>(job, (first + i) * job.cols + col + lane);
      }
    });
    LB_UNROLL(1)
    for (int e = lane; e < kLanes * kRank; e += kLanes) {
      const int c = e / kRank, k = e % kRank;
      p[e] = c < deep && k < rank ? static_cast<double>(job.p[(col + c) * rank + k]) : 0.0;
    }
    __syncwarp();
    if (lane >= rows) continue;
    LB_UNROLL(4)
    for (int c = 0; c < deep; ++c) {
      const double x = static_cast<double>(g[lane][c]);
      LB_UNROLL(8)
      for (int k = 0; k < kRank; ++k) sum[k] = __builtin_fma(x, p[c * kRank + k], sum[k]);
    }
  }
  LB_UNROLL(8)
  for (int k = 0; k < kRank; ++k) {
    if (lane < rows && k < rank)
      job.low[(first + lane) * rank + k] = canonical(static_cast<float>(sum[k]));
  }
}

__global__ void __launch_bounds__(kNarrowWarps* kLanes, 4)
    lowrank_narrow(LB_ARGUMENT(LowRankBatch) batch) {
  LB_SHARED(NarrowShared, shared);
  if (batch.skipped()) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes, warp = thread / kLanes;
  LB_UNROLL(1)
  for (int64_t i = warp_number<kNarrowWarps>(thread); i < batch.units; i += warps<kNarrowWarps>()) {
    const LowRankUnit unit = unit_at(batch, i, lane);
    const LowRankJob job = batch.jobs[unit.job];
    if (job.rank == 1) {
      narrow_rows<1>(job, shared.p[warp], shared.g[warp], unit.number * kLanes, lane);
    } else {
      narrow_rows<kNarrowRank>(job, shared.p[warp], shared.g[warp], unit.number * kLanes, lane);
    }
  }
}

// ---- tiles of a product: 64 x 64 sums per block of threads, 16 per thread ----

constexpr int kSide = 64, kDeep = 16, kGrid = 16, kEachWay = kSide / kGrid;
constexpr int kProductThreads = kGrid * kGrid, kProductWarps = kProductThreads / kLanes;

struct ProductShared {
  union {
    struct {
      double a[kDeep][kSide + 1], b[kDeep][kSide + 1];
    };
    float out[kSide][kSide];
  };
  WarpSum sum[kProductWarps];
};

/// out[i][j] = sum_c a(i, c) b(c, j), c ascending. `a` and `b` give 0 out of range. across: whether
/// b(c, j) with neighboring j are neighbors in memory, else those with neighboring c.
template <class A, class B>
__device__ __forceinline__ void multiply_tile(ProductShared& shared, int64_t depth, const A& a,
                                              const B& b, bool across, int thread) {
  const int row = thread / kGrid, col = thread % kGrid;
  double sum[kEachWay][kEachWay] = {};
  LB_UNROLL(1)
  for (int64_t at = 0; at < depth; at += kDeep) {
    const int deep = static_cast<int>(depth - at < kDeep ? depth - at : kDeep);
    __syncthreads();
    for (int e = thread; e < kSide * kDeep; e += kProductThreads) {
      const int c = e % kDeep, i = e / kDeep;
      if (c < deep) shared.a[c][i] = a(i, at + c);
    }
    for (int e = thread; e < kSide * kDeep; e += kProductThreads) {
      const int c = across ? e / kSide : e % kDeep, j = across ? e % kSide : e / kDeep;
      if (c < deep) shared.b[c][j] = b(at + c, j);
    }
    __syncthreads();
    LB_UNROLL(1)
    for (int c = 0; c < deep; ++c) {
      double x[kEachWay], y[kEachWay];
      for (int r = 0; r < kEachWay; ++r) x[r] = shared.a[c][row + kGrid * r];
      for (int q = 0; q < kEachWay; ++q) y[q] = shared.b[c][col + kGrid * q];
      for (int r = 0; r < kEachWay; ++r) {
        for (int q = 0; q < kEachWay; ++q) sum[r][q] = __builtin_fma(x[r], y[q], sum[r][q]);
      }
    }
  }
  __syncthreads();
  for (int r = 0; r < kEachWay; ++r) {
    for (int q = 0; q < kEachWay; ++q)
      shared.out[row + kGrid * r][col + kGrid * q] = canonical(static_cast<float>(sum[r][q]));
  }
  __syncthreads();
}

/// The products: L = G P of a tall matrix; Fira's residual (G - alpha back(L)) s with the sum of
/// its squares; Fira's step by alpha back(N) + residual / divisor.
enum class Product { kLow, kResidual, kStep };

template <Product kWhat>
LB_HD int64_t product_units(const LowRankJob& job) {
  if (kWhat == Product::kLow) {
    return job.tall && job.rank > kNarrowRank
               ? ceil_div(job.rows, kSide) * ceil_div(job.rank, kSide)
               : 0;
  }
  return job.fira ? ceil_div(job.rows, kSide) * ceil_div(job.cols, kSide) : 0;
}

/// The product of a unit whose first sum is (row, col).
template <Product kWhat>
__device__ __forceinline__ void product_tile(const LowRankJob& job, ProductShared& shared,
                                             int64_t row, int64_t col, int thread) {
  const int64_t rank = job.rank;
  if constexpr (kWhat == Product::kLow) {
    visit(job.grad_format, GradFormats{}, [&](auto format) {
      multiply_tile(
          shared, job.cols,
          [&](int i, int64_t c) {
            return row + i < job.rows ? static_cast<double>(grad_at<decltype(format)>(
                                            job, (row + i) * job.cols + c))
                                      : 0.0;
          },
          [&](int64_t c, int j) {
            return col + j < rank ? static_cast<double>(job.p[c * rank + col + j]) : 0.0;
          },
          true, thread);
    });
  } else {
    const float* x = kWhat == Product::kStep ? job.n : job.low;
    const float *left = job.tall ? x : job.p, *right = job.tall ? job.p : x;
    multiply_tile(
        shared, rank,
        [&](int i, int64_t c) {
          return row + i < job.rows ? static_cast<double>(left[(row + i) * rank + c]) : 0.0;
        },
        [&](int64_t c, int j) {
          if (col + j >= job.cols) return 0.0;
          return static_cast<double>(
              right[job.tall ? (col + j) * rank + c : c * job.cols + col + j]);
        },
        !job.tall, thread);
  }
}

template <Product kWhat>
__global__ void __launch_bounds__(kProductThreads, 2)
    lowrank_product(LB_ARGUMENT(LowRankBatch) batch) {
  LB_SHARED(ProductShared, shared);
  if (batch.skipped()) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  WarpSum& sum = shared.sum[thread / kLanes];
  if (kWhat == Product::kResidual) sum.clear(lane);
  int64_t before = -1;
  LB_UNROLL(1)
  for (int64_t i = blockIdx.x; i < batch.units; i += gridDim.x) {
    const LowRankUnit unit = unit_at(batch, i, lane);
    if (kWhat == Product::kResidual && before >= 0 && unit.job != before)
      sum.flush(batch.jobs[before].words + kSquaresOfUpdate * ExactSum::kWords, lane);
    before = unit.job;
    const LowRankJob job = batch.jobs[unit.job];
    if (kWhat == Product::kStep && !job.write) continue;
    const int64_t width = kWhat == Product::kLow ? job.rank : job.cols;
    const int64_t across = ceil_div(width, kSide), down = divide(unit.number, across);
    const int64_t row = down * kSide, col = (unit.number - down * across) * kSide;
    product_tile<kWhat>(job, shared, row, col, thread);
    // The elements e of the tile that belong to this warp: half a row at a time.
    constexpr int kOwn = kSide * kSide / kProductWarps;
    const int own = thread / kLanes * kOwn + lane;
    const auto each = [&](int e, const auto& use) {
      const int64_t y = row + e / kSide, x = col + e % kSide;
      if (y < job.rows && x < width) use(y, x, shared.out[e / kSide][e % kSide]);
    };
    if constexpr (kWhat == Product::kLow) {
      LB_UNROLL(1)
      for (int e = own; e < own + kOwn; e += kLanes)
        each(e, [&](int64_t y, int64_t x, float out) { job.low[y * width + x] = out; });
    } else if constexpr (kWhat == Product::kResidual) {
      LB_UNROLL(1)
      for (int part = own; part < own + kOwn; part += kTile) {
        visit(job.grad_format, GradFormats{}, [&](auto format) {
          LB_UNROLL(1)
          for (int e = 0; e < kTile; e += kLanes) {
            float square = 0.0f;
            each(part + e, [&](int64_t y, int64_t x, float out) {
              const float g = grad_at<decltype(format)>(job, y * width + x);
              const float rest = job.scaling.residual(g, out, scale_at(job, y, x));
              job.residual[y * width + x] = rest;
              square = rest * rest;
            });
            sum.x[e + lane] = square;
          }
        });
        sum.add(kTile, lane);
      }
    } else {
      visit(job.param_format, ParamFormats{}, [&](auto format) {
        using P = decltype(format);
        LB_UNROLL(1)
        for (int e = own; e < own + kOwn; e += kLanes) {
          each(e, [&](int64_t y, int64_t x, float out) {
            const int64_t at = y * width + x;
            const auto index = static_cast<uint64_t>(job.first + at);
            uint32_t random16 = 0;
            if constexpr (P::kRandom) {
              const Random8 random = random8(job.random, index / 8);
              uint32_t word = random.word[0];
              for (int w = 1; w < 4; ++w)
                word = static_cast<int>(index >> 1 & 3) == w ? random.word[w] : word;
              random16 = word >> (16 * (index & 1)) & 0xffffu;
            }
            step_element<P>(job, at, job.scaling.joined(out, job.residual[at]), random16);
          });
        }
      });
    }
  }
  if (kWhat == Product::kResidual && before >= 0)
    sum.flush(batch.jobs[before].words + kSquaresOfUpdate * ExactSum::kWords, lane);
}

}  // namespace lowbit::cuda
