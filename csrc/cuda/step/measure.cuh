// The measuring rounds of a rule on a GPU, with the results of cpu/measure.cpp and of the CPU's
// finalize_factor. Sums are integers, so the order does not matter.
#pragma once

#include "core/exact_sum.h"
#include "cuda/step/step.cuh"
#include "cuda/sums.cuh"

namespace lowbit::cuda {

// ---- sums of a round ----

/// The number of rows of a two-dimensional parameter that a warp measures in sequence, so that it
/// adds to the sums of columns once for all of them.
constexpr int kStripRows = 32;

/// Whether all rows are of one matrix, and share the sums of its columns. A row that is a matrix by
/// itself, such as those of [B, 1, C], has as many columns.
LB_HD bool one_matrix_here(const Job& job) {
  return job.inner_cols == job.cols && job.batches <= 1;
}
/// The rows of a strip. With more than two dimensions every row has column sums of its own.
LB_HD int64_t rows_in_strip(const Job& job) { return one_matrix_here(job) ? kStripRows : 1; }
/// The number of parts: one tile of each row of a strip, the work of one warp.
LB_HD int64_t measure_parts(const Job& job) {
  return ceil_div(job.rows, rows_in_strip(job)) * job.tiles_per_row();
}

/// The contributions of a strip to the sums of a chunk's columns. The first value of a column
/// places a window of exponents in which the terms of all rows have an exact sum in 64 bits. Terms
/// outside are added one by one. A lane has every 32nd column, and no other lane reads it.
struct ColumnSums {
  // 24 bits of the mantissa, 5 for 32 rows, 33 of the window, and the sign.
  static constexpr int kAbove = 33, kBelow = 20, kNone = 255;
  static constexpr int kLastBase = 16 * (ExactSum::kBins - 3) - 1;  // four pieces stay below kBins
  static_assert(24 + 5 + kAbove < 63 && kStripRows <= 32 && kLastBase + kAbove > 253);
  int64_t sum[kTile];
  uint8_t base[kTile];

  __device__ __forceinline__ void forget(int lane) {
    for (int i = lane; i < kTile; i += kLanes) base[i] = kNone;
  }
  __device__ __forceinline__ void add(int i, float x, int64_t* words) {
    if (magnitude_bits(x) == 0) return;
    const Term t = term_of(x);
    int low = base[i];
    if (low == kNone) {
      low = t.position > kBelow ? t.position - kBelow : 0;
      low = low < kLastBase ? low : kLastBase;
      base[i] = static_cast<uint8_t>(low);
      sum[i] = 0;
    }
    const int shift = t.position - low;
    if (magnitude_bits(x) < kInfinityBits && shift >= 0 && shift <= kAbove) {
      sum[i] += t.mantissa << shift;
    } else {
      add_value(x, words);
    }
  }
  __device__ __forceinline__ void flush(int i, int64_t* words) const {
    if (base[i] == kNone) return;
    for (int k = 0; k < 4; ++k) add_piece(sum[i], k, base[i], words);
  }
};

struct MeasureWarp {
  AnyWarp any;
  int64_t totals[kMaxTotals][ExactSum::kWords];  // of the warp's current job
  ColumnSums columns;
};
struct MeasureShared {
  TablesOf<StateFormats> tables;
  MeasureWarp warp[kAnyWarps];
};

template <class U, int kRound>
__device__ __forceinline__ void measure_values(AnyWarp& w, const Chunk& at, int lane) {
  const typename U::Coef coef = *reinterpret_cast<const typename U::Coef*>(w.job.coef);
  LB_UNROLL(1)
  for (int i = lane; i < at.n; i += kLanes) {
    Values<U> s{};
    for (int k = 0; k < U::kSlots; ++k) s[k] = w.s[k][i];
    float f[2 * kMaxFactors] = {}, grid = 0.0f, totals[kMaxTotals] = {};
    if (!at.has(i)) {
      w.g[i] = w.p[i] = w.s[0][i] = 0.0f;
      continue;
    }
    factors_at<U>(w.job, at.row, at.col + i, f);
    U::template measure<kRound>(w.g[i], w.p[i], s, f, coef, grid, totals);
    w.g[i] = grid;
    w.p[i] = totals[0];
    w.s[0][i] = totals[1];
  }
}

/// Adds the chunk's values to the sums: grid replaces g, and totals replace p and s[0].
__device__ __forceinline__ void measure_chunk(AnyWarp& w, const Chunk& at, int round, int lane) {
  visit(w.job.rule, UpdateRules{}, [&](auto rule) {
    using U = decltype(rule);
    if constexpr (rounds_of<U>() > 0) {
      for_each_round<U>([&](auto r) {
        constexpr int kRound = decltype(r)::kValue;
        if (kRound == round) measure_values<U, kRound>(w, at, lane);
      });
    }
  });
}

/// Adds to the sums of rows and columns of the matrices that the chunk touches.
__device__ __forceinline__ void add_grid(MeasureWarp& own, const Chunk& at, const Factor& factor,
                                         int lane) {
  const AnyWarp& w = own.any;
  const Job& job = w.job;
  const bool short_rows = job.inner_cols < kLanes, whole = one_matrix_here(job);
  for (int i = lane; i < at.n; i += kLanes) {
    if (!at.has(i)) continue;
    const Inner inner = inner_of(job, at.row, at.col + i);
    const int64_t c = inner.matrix * (job.inner_cols + 1) + inner.col;
    int64_t* words = factor.col_sums + c * ExactSum::kWords;
    if (whole) {
      own.columns.add(i, w.g[i], words);
    } else {
      add_value(w.g[i], words);
    }
    if (short_rows) add_value(w.g[i], factor.row_sums + inner.row * ExactSum::kWords);
  }
  if (short_rows) return;
  LB_UNROLL(1)
  for (int begin = at.begin; begin < at.end;) {
    const Inner inner = inner_of(job, at.row, at.col + begin);
    const int64_t left = job.inner_cols - inner.col;
    const int end = left < at.end - begin ? begin + static_cast<int>(left) : at.end;
    add_values(w.g, begin, end, factor.row_sums + inner.row * ExactSum::kWords, lane);
    begin = end;
  }
}

struct RoundShape {
  int round, grid_factor, totals;
};

/// Adds the warp's totals to those of the job.
__device__ __forceinline__ void flush_totals(const Job& job,
                                             int64_t (&totals)[kMaxTotals][ExactSum::kWords],
                                             int round, int lane) {
  __syncwarp();  // memory order: carrying is not an atomic addition
  if (lane < kMaxTotals) exact_carry(totals[lane]);
  __syncwarp();
  for (int k = 0; k < kMaxTotals; ++k) {
    if (lane < ExactSum::kWords) {
      add_word(job.totals + (round * kMaxTotals + k) * ExactSum::kWords + lane, totals[k][lane]);
      totals[k][lane] = 0;
    }
  }
  __syncwarp();  // memory order: additions follow a shuffle
}

__global__ void __launch_bounds__(kAnyWarps* kLanes, kAnyBlocks)
    measure(const Batch batch, const RoundShape shape) {
  LB_SHARED(MeasureShared, shared);
  if (batch.found_inf != nullptr && *batch.found_inf != 0.0f) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  fill_tables(shared.tables, StateFormats{}, thread, kAnyWarps * kLanes);
  __syncthreads();
  MeasureWarp& own = shared.warp[thread / kLanes];
  AnyWarp& w = own.any;
  const Job& job = w.job;
  for (int k = 0; k < kMaxTotals; ++k) {
    if (lane < ExactSum::kWords) own.totals[k][lane] = 0;
  }
  TileRange range;
  LB_UNROLL(1)
  for (int64_t i = warp_number<kAnyWarps>(thread); i < batch.tiles; i += warps<kAnyWarps>()) {
    if (range.end != 0 && i >= range.end) flush_totals(job, own.totals, shape.round, lane);
    stage_job(batch, i, lane, w.job, range);
    const int64_t rows = rows_in_strip(job);
    TileAt tile = tile_at(job, i - range.begin);
    const int64_t strip = tile.row * rows;
    const int slots = slots_of(job.rule);
    LB_UNROLL(1)
    for (int64_t col = tile.col; col < tile.end; col += kTile) {
      own.columns.forget(lane);
      LB_UNROLL(1)
      for (tile.row = strip; tile.row < strip + rows && tile.row < job.rows; ++tile.row) {
        const Chunk at = chunk_at(job, tile, col);
        if (at.begin >= at.end) continue;
        load_chunk(w, at, slots, lane, shared.tables);
        measure_chunk(w, at, shape.round, lane);
        LB_UNROLL(1)
        for (int k = 0; k < shape.totals; ++k)
          add_values(k == 0 ? w.p : w.s[0], 0, at.n, own.totals[k], lane);
        if (shape.grid_factor < 0) continue;
        if (job.one_matrix()) add_values(w.g, 0, at.n, own.totals[kGridTotal], lane);
        add_grid(own, at, job.factor[shape.grid_factor], lane);
      }
      if (shape.grid_factor < 0 || rows == 1) continue;
      int64_t* words = job.factor[shape.grid_factor].col_sums + col * ExactSum::kWords;
      for (int e = lane; e < kTile; e += kLanes) own.columns.flush(e, words + e * ExactSum::kWords);
    }
  }
  if (range.end != 0) flush_totals(job, own.totals, shape.round, lane);
}

/// The work of one block of threads: one of many matrices, or part of the columns, then of the
/// rows, of a single one. Batch::ends counts these parts.
constexpr int kMatrixThreads = 128, kFinalizedLines = kMatrixThreads / kLanes * kTile;

LB_HD int64_t finalize_parts(const Job& job) {
  return job.one_matrix() ? ceil_div(job.inner_cols + job.inner_rows, kFinalizedLines)
                          : job.batches;
}
struct FinalizePart {
  int64_t matrix, col, col_end, row, row_end;
};
__device__ __forceinline__ FinalizePart finalize_part(const Job& job, int64_t i) {
  if (!job.one_matrix()) return {i, 0, job.inner_cols, 0, job.inner_rows};
  const int64_t begin = i * kFinalizedLines, end = begin + kFinalizedLines, cols = job.inner_cols;
  const auto within = [](int64_t at, int64_t length) {
    return at < 0 ? 0 : at < length ? at : length;
  };
  return {0, within(begin, cols), within(end, cols), within(begin - cols, job.inner_rows),
          within(end - cols, job.inner_rows)};
}

/// Adds the old row means to the sum after the columns of each matrix.

__global__ void __launch_bounds__(kMatrixThreads, 4) old_rows(const Batch batch, const int k) {
  if (batch.found_inf != nullptr && *batch.found_inf != 0.0f) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  for (int64_t m = blockIdx.x; m < batch.tiles; m += gridDim.x) {
    const int64_t i = find_job(batch, m, lane);
    const Job& job = batch.jobs[i];
    const FinalizePart part = finalize_part(job, m - (i > 0 ? batch.ends[i - 1] : 0));
    const int64_t b = part.matrix;
    const Factor& factor = job.factor[k];
    int64_t* words =
        factor.col_sums + (b * (job.inner_cols + 1) + job.inner_cols) * ExactSum::kWords;
    // A row that begins on another rank counts there, with all its matrices.
    const int64_t skipped =
        job.front > 0 ? divide(job.cols, job.inner_cols) - b * job.inner_rows : 0;
    const int64_t first = part.row > skipped ? part.row : skipped;
    for (int64_t r = first + thread / kLanes * kTile; r < part.row_end; r += kFinalizedLines) {
      const int64_t left = part.row_end - r;
      add_values(factor.row + b * job.inner_rows + r, 0,
                 static_cast<int>(left < kTile ? left : kTile), words, lane);
    }
  }
}

struct FinalizeShared {
  int64_t digit[kMatrixThreads][ExactSum::kWords], added[ExactSum::kWords];
  double mean;
};

/// Moves row and column means toward the measured ones. The mean that divides the rows needs the
/// sum over all columns of the matrix; for a single matrix this is the total of its grid.
__global__ void __launch_bounds__(kMatrixThreads, 4)
    finalize_factor(const Batch batch, const FactorMove* moves, const RoundShape shape) {
  LB_SHARED(FinalizeShared, shared);
  constexpr int kWords = ExactSum::kWords;
  if (batch.found_inf != nullptr && *batch.found_inf != 0.0f) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  int64_t* digit = shared.digit[thread];
  LB_UNROLL(1)
  for (int64_t m = blockIdx.x; m < batch.tiles; m += gridDim.x) {
    const int64_t i = find_job(batch, m, lane);
    const Job& job = batch.jobs[i];
    const FactorMove move = moves[i];
    const FinalizePart part = finalize_part(job, m - (i > 0 ? batch.ends[i - 1] : 0));
    const int64_t b = part.matrix;
    const Factor& factor = job.factor[shape.grid_factor];
    const int64_t* sums = factor.col_sums + b * (job.inner_cols + 1) * kWords;
    const double cols = static_cast<double>(job.global_inner_cols),
                 rows = static_cast<double>(job.global_inner_rows);
    if (job.global_inner_rows == 0 || job.global_inner_cols == 0)
      continue;  // no means without elements
    if (thread < kWords) shared.added[thread] = 0;
    __syncthreads();
    LB_UNROLL(1)
    for (int64_t c = part.col + thread; c < part.col_end; c += kMatrixThreads) {
      const int64_t* words = sums + c * kWords;
      float& mean = factor.col[b * job.inner_cols + c];
      mean = moved(mean, exact_value(words, digit) / rows, move.weight);
      if (job.one_matrix()) continue;  // its sum is one of the totals
      for (int w = 0; w < kWords; ++w) digit[w] = words[w];
      exact_carry(digit);
      for (int w = 0; w < kWords; ++w) add_word(shared.added + w, digit[w]);
    }
    __syncthreads();
    if (thread == 0 && part.row < part.row_end) {
      const double old = exact_value(sums + job.inner_cols * kWords, digit) / rows;
      const int64_t* all = job.one_matrix()
                               ? job.totals + (shape.round * kMaxTotals + kGridTotal) * kWords
                               : shared.added;
      shared.mean = mean_of_rows(old, exact_value(all, digit) / (rows * cols), move);
    }
    __syncthreads();
    const int64_t base = b * job.inner_rows;
    LB_UNROLL(1)
    for (int64_t r = base + part.row + thread; r < base + part.row_end; r += kMatrixThreads) {
      const float row = moved(factor.row[r],
                              exact_value(factor.row_sums + r * kWords, digit) / cols, move.weight);
      factor.row[r] = row;
      factor.scaled[r] = scaled_row(row, shared.mean);
    }
  }
}

}  // namespace lowbit::cuda
