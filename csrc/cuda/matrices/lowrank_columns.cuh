// L of a matrix that is not tall, as sums over rows in fixed point (core/lowrank/fixed.h), and the
// scales of channels. The sums are integers, so any block of threads may add any strip of rows.
#pragma once

#include "cuda/matrices/lowrank.cuh"

namespace lowbit::cuda {

// ---- column maxima ----

constexpr int kMaxRows = 64, kMaxCols = 4 * kLanes;

LB_HD int64_t absmax_units(const LowRankJob& job) {
  return job.tall ? 0 : ceil_div(job.rows, kMaxRows) * ceil_div(job.cols, kMaxCols);
}

__global__ void __launch_bounds__(kLowRankThreads) lowrank_absmax(LB_ARGUMENT(LowRankBatch) batch) {
  if (batch.skipped()) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  LB_UNROLL(1)
  for (int64_t i = warp_number<kLowRankWarps>(thread); i < batch.units;
       i += warps<kLowRankWarps>()) {
    const LowRankUnit unit = unit_at(batch, i, lane);
    const LowRankJob job = batch.jobs[unit.job];
    const int64_t strips = ceil_div(job.cols, kMaxCols), strip = divide(unit.number, strips);
    const int64_t col = (unit.number - strip * strips) * kMaxCols + lane, first = strip * kMaxRows;
    const int64_t last = job.rows - first < kMaxRows ? job.rows : first + kMaxRows;
    uint32_t absmax[4] = {};
    visit(job.grad_format, GradFormats{}, [&](auto format) {
      LB_UNROLL(2)
      for (int64_t row = first; row < last; ++row) {
        LB_UNROLL(4)
        for (int q = 0; q < 4; ++q) {
          if (col + q * kLanes >= job.cols) continue;
          const uint32_t m =
              magnitude_bits(grad_at<decltype(format)>(job, row * job.cols + col + q * kLanes));
          absmax[q] = m > absmax[q] ? m : absmax[q];
        }
      }
    });
    LB_UNROLL(4)
    for (int q = 0; q < 4; ++q) {
      if (col + q * kLanes < job.cols && absmax[q] != 0)
        atomicMax(job.absmax + col + q * kLanes, absmax[q]);
    }
  }
}

// ---- sums in fixed point ----

/// Each thread of a block handles one column, and this many of its sums at once.
constexpr int kSumThreads = 128, kSumDepth = 32;

/// The number of sums of a column per pass, and the rows of a strip, whose sums are exact in
/// double.
template <bool kOne>
constexpr int kSumsAtOnce = kOne ? 1 : 8;
LB_HD int64_t sum_rows(const LowRankJob& job) { return job.rank == 1 ? 128 : 1024; }
static_assert(1024 <= kFixedExact);

struct SumGrid {
  // The numbers of strips of rows, of parts of the sums, and of groups of columns.
  int64_t strips, parts, cols;
};
LB_HD SumGrid sum_grid(const LowRankJob& job) {
  return {ceil_div(job.rows, sum_rows(job)), ceil_div(job.rank, job.rank == 1 ? 1 : 8),
          ceil_div(job.cols, kSumThreads)};
}
LB_HD int64_t sum_units(const LowRankJob& job) {
  const SumGrid grid = sum_grid(job);
  return job.tall ? 0 : grid.strips * grid.parts * grid.cols;
}

struct SumShared {
  double p[kSumDepth * kSumsAtOnce<false>];
};

/// Adds rows [first, last) of a column, if there is one, to the sums k, k + 1, ...
template <int kMany>
__device__ __forceinline__ void sum_strip(const LowRankJob& job, SumShared& shared, int64_t col,
                                          int64_t k, int64_t first, int64_t last, int thread) {
  const bool here = col < job.cols;
  const FixedColumn column(here ? job.absmax[col] : 0, job.exponent);
  const double rounder = column.rounder();
  double sum[kMany] = {};
  LB_UNROLL(1)
  for (int64_t row = first; row < last; row += kSumDepth) {
    const int deep = static_cast<int>(last - row < kSumDepth ? last - row : kSumDepth);
    __syncthreads();
    LB_UNROLL(1)
    for (int e = thread; e < deep * kMany; e += kSumThreads) {
      const int of = e % kMany;
      shared.p[e] = k + of < job.rank
                        ? static_cast<double>(job.p[(row + e / kMany) * job.rank + k + of])
                        : 0.0;
    }
    __syncthreads();
    if (!here) continue;
    visit(job.grad_format, GradFormats{}, [&](auto format) {
      LB_UNROLL(4)
      for (int i = 0; i < deep; ++i) {
        const double g =
            static_cast<double>(grad_at<decltype(format)>(job, (row + i) * job.cols + col));
        // The product is exact, so the sum is rounded once, as in fixed_term.
        LB_UNROLL(8)
        for (int of = 0; of < kMany; ++of)
          sum[of] += __builtin_fma(shared.p[i * kMany + of], g, rounder) - rounder;
      }
    });
  }
  LB_UNROLL(8)
  for (int of = 0; of < kMany; ++of) {
    if (here && k + of < job.rank)
      add_word(job.sums + (k + of) * job.cols + col, column.units(sum[of]));
  }
}

__global__ void __launch_bounds__(kSumThreads) lowrank_columns(LB_ARGUMENT(LowRankBatch) batch) {
  LB_SHARED(SumShared, shared);
  if (batch.skipped()) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  LB_UNROLL(1)
  for (int64_t i = blockIdx.x; i < batch.units; i += gridDim.x) {
    const LowRankUnit unit = unit_at(batch, i, lane);
    const LowRankJob job = batch.jobs[unit.job];
    const SumGrid grid = sum_grid(job);
    const int64_t at = divide(unit.number, grid.cols), strip = divide(at, grid.parts);
    const int64_t col = (unit.number - at * grid.cols) * kSumThreads + thread;
    const int64_t part = at - strip * grid.parts, first = strip * sum_rows(job);
    const int64_t last = job.rows - first < sum_rows(job) ? job.rows : first + sum_rows(job);
    if (job.rank == 1) {
      sum_strip<kSumsAtOnce<true>>(job, shared, col, part, first, last, thread);
    } else {
      sum_strip<kSumsAtOnce<false>>(job, shared, col, part * kSumsAtOnce<false>, first, last,
                                    thread);
    }
  }
}

/// L from the sums, in units of kTile columns of one row.
LB_HD int64_t value_units(const LowRankJob& job) {
  return job.tall ? 0 : job.rank * row_tiles(job);
}

__global__ void __launch_bounds__(kLowRankThreads) lowrank_values(LB_ARGUMENT(LowRankBatch) batch) {
  if (batch.skipped()) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  LB_UNROLL(1)
  for (int64_t i = warp_number<kLowRankWarps>(thread); i < batch.units;
       i += warps<kLowRankWarps>()) {
    const LowRankUnit unit = unit_at(batch, i, lane);
    const LowRankJob job = batch.jobs[unit.job];
    const int64_t tiles = row_tiles(job), k = divide(unit.number, tiles);
    const int64_t first = (unit.number - k * tiles) * kTile;
    LB_UNROLL(1)
    for (int64_t col = first + lane; col < first + kTile && col < job.cols; col += kLanes)
      job.low[k * job.cols + col] =
          FixedColumn(job.absmax[col], job.exponent).value(job.sums[k * job.cols + col]);
  }
}

// ---- scales ----

/// The scale of each channel, one channel per lane.
LB_HD int64_t channel_units(const LowRankJob& job) {
  return job.by_tensor ? 0 : ceil_div(job.channels(), kLanes);
}

__global__ void __launch_bounds__(kLowRankThreads)
    lowrank_channels(LB_ARGUMENT(LowRankBatch) batch) {
  if (batch.skipped()) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  LB_UNROLL(1)
  for (int64_t i = warp_number<kLowRankWarps>(thread); i < batch.units;
       i += warps<kLowRankWarps>()) {
    const LowRankUnit unit = unit_at(batch, i, lane);
    const LowRankJob job = batch.jobs[unit.job];
    const int64_t channel = unit.number * kLanes + lane;
    if (channel >= job.channels()) continue;
    const int64_t begin = job.tall ? channel * job.rank : channel, step = job.tall ? 1 : job.cols;
    double of_n = 0.0, of_low = 0.0;
    LB_UNROLL(4)
    for (int64_t k = 0; k < job.rank; ++k) {
      const double x = job.n[begin + k * step], y = job.low[begin + k * step];
      of_n = __builtin_fma(x, x, of_n);  // the product is exact
      of_low = __builtin_fma(y, y, of_low);
    }
    job.scales[channel] = canonical(norm_ratio(of_n, of_low));
  }
}

/// The squares of N and of L, if the whole tensor has one scale.
LB_HD int64_t square_units(const LowRankJob& job) {
  return job.by_tensor ? ceil_div(job.low_size(), kTile) : 0;
}
struct SquaresShared {
  WarpSum n[kLowRankWarps], low[kLowRankWarps];
};

__global__ void __launch_bounds__(kLowRankThreads)
    lowrank_squares(LB_ARGUMENT(LowRankBatch) batch) {
  LB_SHARED(SquaresShared, shared);
  if (batch.skipped()) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  WarpSum& of_n = shared.n[thread / kLanes];
  WarpSum& of_low = shared.low[thread / kLanes];
  of_n.clear(lane);
  of_low.clear(lane);
  const auto flush = [&](int64_t job) {
    of_n.flush(batch.jobs[job].words + kSquaresOfN * ExactSum::kWords, lane);
    of_low.flush(batch.jobs[job].words + kSquaresOfLow * ExactSum::kWords, lane);
  };
  int64_t before = -1;
  LB_UNROLL(1)
  for (int64_t i = warp_number<kLowRankWarps>(thread); i < batch.units;
       i += warps<kLowRankWarps>()) {
    const LowRankUnit unit = unit_at(batch, i, lane);
    if (before >= 0 && unit.job != before) flush(before);
    before = unit.job;
    const LowRankJob job = batch.jobs[unit.job];
    const int64_t first = unit.number * kTile, left = job.low_size() - first;
    const int n = static_cast<int>(left < kTile ? left : kTile);
    for (int e = lane; e < n; e += kLanes) {
      const float x = job.n[first + e], y = job.low[first + e];
      of_n.x[e] = x * x;
      of_low.x[e] = y * y;
    }
    of_n.add(n, lane);
    of_low.add(n, lane);
  }
  if (before >= 0) flush(before);
}

}  // namespace lowbit::cuda
