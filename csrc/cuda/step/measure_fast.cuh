// The measuring rounds of a rule with fixed kernels: formats fixed at compile time, 8 neighboring
// columns per lane in registers, a strip of rows per warp. Sums are exact, so they are those of
// `measure` (measure.cuh), which serves all else.
//
// A lane keeps the sums of its columns, and of the totals, over the rows of the strip; a row is
// added up by the warp. Factors of columns are read once a strip.
#pragma once

#include "cuda/step/lane_sums.cuh"
#include "cuda/step/measure.cuh"

namespace lowbit::cuda {

constexpr int kMeasureWarps = 8, kMeasureBlocks = 2;

template <class... S>
struct MeasureFastShared {
  struct Warp {
    Job job;
    int64_t totals[kMaxTotals][ExactSum::kWords];  // of the warp's current job
  };
  StateTables<Types<>, S...> tables;
  Warp warp[kMeasureWarps];
};

/// What a lane reads of a row.
template <class U, int kRound, class P, class G>
struct MeasuredRow {
  static constexpr bool kParam = (reads_of<U>(kRound) & kReadsParam) != 0;
  Pack8<typename G::Storage> grad;
  Pack8<typename P::Storage> param;

  __device__ __forceinline__ void load(const Job& job, int64_t at) {
    grad = grad.load(static_cast<const typename G::Storage*>(job.grad) + at);
    if constexpr (kParam)
      param = param.load(static_cast<const typename P::Storage*>(job.param) + at);
  }
};

/// States of a lane's 8 values. A job has one block for all lanes or whole blocks for some.
template <int kSlot = 0, class U, class Tables>
__device__ __forceinline__ void measured_states(Types<>, const Job&, int64_t, int64_t,
                                                const Tables&, Eights<U>&) {}
template <int kSlot = 0, class U, class Tables, class F, class... S>
__device__ __forceinline__ void measured_states(Types<F, S...>, const Job& job, int64_t row,
                                                int64_t col, const Tables& tables, Eights<U>& s) {
  const StateSlot& slot = job.state[kSlot];
  const auto at = static_cast<uint64_t>(row * job.cols + col) / kEach;
  auto* values = static_cast<char*>(slot.values) + at * F::kBits;
  if constexpr (F::kScaled) {
    const int64_t block = row * job.blocks(slot.block) + col / slot.block;
    dequantize8<F>(values, static_cast<char*>(slot.scales), 0, static_cast<uint32_t>(block),
                   tables.template get<F>(), s[kSlot]);
  } else {
    dequantize8<F>(values, nullptr, 0, 0, tables.template get<F>(), s[kSlot]);
  }
  measured_states<kSlot + 1, U>(Types<S...>{}, job, row, col, tables, s);
}

template <class U, int kRound, class P, class G, class... S>
__global__ void __launch_bounds__(kMeasureWarps* kLanes, kMeasureBlocks)
    measure_fast(const Batch batch, const RoundShape shape) {
  using Shared = MeasureFastShared<S...>;
  constexpr bool kGrid = U::grid_factor(kRound) >= 0;
  // Loops over totals are unrolled, since an array that is indexed at run time is in local memory.
  constexpr int kTotals = U::totals(kRound), kSums = kTotals > 0 ? kTotals : 1;
  static_assert(kMaxTotals == 2);
  constexpr bool kFactors = factors_of<U>() > 0 && (reads_of<U>(kRound) & kReadsFactors) != 0;
  LB_SHARED(Shared, shared);
  if (batch.found_inf != nullptr && *batch.found_inf != 0.0f) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  shared.tables.fill(thread, kMeasureWarps * kLanes);
  __syncthreads();
  auto& own = shared.warp[thread / kLanes];
  const Job& job = own.job;
  for (int k = 0; k < kMaxTotals; ++k) {
    if (lane < ExactSum::kWords) own.totals[k][lane] = 0;
  }
  TileRange range;
  LB_UNROLL(1)
  for (int64_t i = warp_number<kMeasureWarps>(thread); i < batch.tiles;
       i += warps<kMeasureWarps>()) {
    if (range.end != 0 && i >= range.end) flush_totals(job, own.totals, kRound, lane);
    stage_job(batch, i, lane, own.job, range);
    const int64_t tiles_per_row = ceil_div(job.cols, kTile), part = i - range.begin;
    const int64_t strip = divide(part, tiles_per_row);
    const int64_t col = (part - strip * tiles_per_row) * kTile + lane * kEach;
    const int64_t first = strip * kStripRows;
    const int64_t end = first + kStripRows < job.rows ? first + kStripRows : job.rows;
    const bool here = col < job.cols;
    const typename U::Coef coef = *reinterpret_cast<const typename U::Coef*>(job.coef);
    // Of CAME's two factors, rounds read the first.
    static_assert(factors_of<U>() <= 1 || __is_same(U, Came));
    const Factor& factor = job.factor[0];
    const Factor& sums = job.factor[kGrid ? U::grid_factor(kRound) : 0];
    int64_t* const columns = kGrid ? sums.col_sums + col * ExactSum::kWords : nullptr;
    int64_t* const grid_total = kGrid && job.one_matrix() ? own.totals[kGridTotal] : nullptr;
    Pack8<float> of_columns;
    of_columns.clear();
    if (kFactors && here) of_columns = of_columns.load(factor.col + col);
    LaneSums<true> column_sums;
    LaneSums<false> total[kSums];
    using Row = MeasuredRow<U, kRound, P, G>;
    Row next;
    next.grad.clear(), next.param.clear();
    if (here) next.load(job, first * job.cols + col);
    LB_UNROLL(1)
    for (int64_t row = first; row < end; ++row) {
      const auto taken = next;
      if (here && row + 1 < end) next.load(job, (row + 1) * job.cols + col);
      float grid[kEach] = {}, totals[kSums][kEach] = {};
      if (here) {
        const float of_row = kFactors ? factor.scaled[row] : 0.0f;
        Eights<U> s{};
        measured_states<0, U>(Types<S...>{}, job, row, col, shared.tables, s);
        for (int e = 0; e < kEach; ++e) {
          Values<U> states{};
          for (int k = 0; k < U::kSlots; ++k) states[k] = s[k][e];
          const float f[2] = {of_row, of_columns.get(e)};
          float found[kMaxTotals] = {};
          const float p = Row::kParam ? P::load(taken.param.get(e), None{}) : 0.0f;
          U::template measure<kRound>(G::load(taken.grad.get(e)), p, states, f, coef, grid[e],
                                      found);
          LB_UNROLL(2)
          for (int k = 0; k < kTotals; ++k) totals[k][e] = found[k];
        }
        if constexpr (kGrid) column_sums.add(grid, columns);
        LB_UNROLL(2)
        for (int k = 0; k < kTotals; ++k) total[k].add(totals[k], own.totals[k]);
      }
      if constexpr (kGrid) add_row(grid, sums.row_sums + row * ExactSum::kWords, grid_total, lane);
    }
    if constexpr (kGrid) column_sums.flush(columns);
    LB_UNROLL(2)
    for (int k = 0; k < kTotals; ++k) total[k].flush(own.totals[k]);
  }
  if (range.end != 0) flush_totals(job, own.totals, kRound, lane);
}

}  // namespace lowbit::cuda
