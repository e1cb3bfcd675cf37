// Gradient, parameter and rule of a warp that gets formats at run time, and the chunks that every
// pass over a job uses (cpu/tile.cpp).
#pragma once

#include "cuda/step/slot.cuh"

namespace lowbit::cuda {

__device__ __forceinline__ int slots_of(int rule) {
  int slots = 0;
  visit(rule, UpdateRules{}, [&](auto r) { slots = decltype(r)::kSlots; });
  return slots;
}

/// The current tile of a warp, in chunks. It begins where blocks do, possibly before the local
/// part.
struct TileAt {
  int64_t row, col, end;
};
__device__ __forceinline__ TileAt tile_at(const Job& job, int64_t tile) {
  const int64_t lead = offset_of(job) & (job.tile - 1);
  const int64_t tiles_per_row = divide(lead + job.cols + job.tile - 1, job.tile);
  const int64_t row = divide(tile, tiles_per_row),
                col = (tile - row * tiles_per_row) * job.tile - lead;
  return {row, col, job.cols - col < job.tile ? job.cols : col + job.tile};
}

/// The local columns of a row. The first and the last row may be partly on other ranks.
struct Here {
  int64_t begin, end;
};
__device__ __forceinline__ Here here_in(const Job& job, int64_t row) {
  return {row == 0 ? job.front : 0, row == job.rows - 1 ? job.cols - job.back : job.cols};
}
__device__ __forceinline__ bool is_here(const Job& job, const TileAt& tile) {
  const Here here = here_in(job, tile.row);
  return (tile.col > here.begin ? tile.col : here.begin) <
         (tile.end < here.end ? tile.end : here.end);
}

__device__ __forceinline__ Chunk chunk_at(const Job& job, const TileAt& tile, int64_t col) {
  const int n = static_cast<int>(tile.end - col < kTile ? tile.end - col : kTile);
  const Here here = here_in(job, tile.row);
  const auto within = [&](int64_t at) {
    return static_cast<int>(at < col ? 0 : at - col > n ? n : at - col);
  };
  return {tile.row, col, n, within(0), within(here.begin), within(here.end)};
}

/// The index of the chunk's first element in parameter and gradient, or, with `front`, in tensors
/// that have room for the elements before the first local one.
__device__ __forceinline__ int64_t first_of(const Job& job, const Chunk& at, int64_t front) {
  return at.row * job.cols + at.col - front;
}

/// Loads gradient, parameter and state of the chunk as float32.
__device__ __forceinline__ void load_chunk(AnyWarp& w, const Chunk& at, int slots, int lane,
                                           const TablesOf<StateFormats>& tables) {
  const Job& job = w.job;
  const int64_t first = first_of(job, at, job.front), whole = first_of(job, at, 0);
  visit(job.grad_format, GradFormats{}, [&](auto format) {
    using G = decltype(format);
    const auto* in = static_cast<const typename G::Storage*>(job.grad) + first;
    for (int i = lane; i < at.n; i += kLanes) w.g[i] = at.has(i) ? G::load(in[i]) : 0.0f;
  });
  visit(job.param_format, ParamFormats{}, [&](auto format) {
    using P = decltype(format);
    const auto* in = static_cast<const typename P::Storage*>(job.param) + first;
    if constexpr (kHasCompensation<P>) {
      const auto* compensation =
          static_cast<const typename P::Compensation*>(job.compensation) + whole;
      LB_UNROLL(2)
      for (int i = lane; i < at.n; i += kLanes)
        w.p[i] = at.has(i) ? P::load(in[i], compensation[i]) : 0.0f;
    } else {
      for (int i = lane; i < at.n; i += kLanes) w.p[i] = at.has(i) ? P::load(in[i], None{}) : 0.0f;
    }
  });
  LB_UNROLL(1)
  for (int k = 0; k < slots; ++k) dequantize_slot(w, k, at, lane, tables);
}

/// The matrix, inner row and inner column of an element, for factored moments.
struct Inner {
  int64_t row, col, matrix;
};
__device__ __forceinline__ Inner inner_of(const Job& job, int64_t row, int64_t col) {
  int64_t in_row = 0, rows_inside = 1;
  if (job.inner_cols != job.cols) {
    in_row = divide(col, job.inner_cols);
    rows_inside = divide(job.cols, job.inner_cols);
    col -= in_row * job.inner_cols;
  }
  const int64_t r = row * rows_inside + in_row;
  return {r, col, job.batches == 1 ? 0 : divide(r, job.inner_rows)};
}

/// Row and column factors of one element, in the rule's order.
template <class U>
__device__ __forceinline__ void factors_at(const Job& job, int64_t row, int64_t col,
                                           float (&f)[2 * kMaxFactors]) {
  if constexpr (factors_of<U>() > 0) {
    const Inner at = inner_of(job, row, col);
    for (int k = 0; k < factors_of<U>(); ++k) {
      f[2 * k] = job.factor[k].scaled[at.row];
      f[2 * k + 1] = job.factor[k].col[at.matrix * job.inner_cols + at.col];
    }
  }
}

__device__ __forceinline__ void update_chunk(AnyWarp& w, const Chunk& at, int lane) {
  visit(w.job.rule, UpdateRules{}, [&](auto rule) {
    using U = decltype(rule);
    const typename U::Coef coef = *reinterpret_cast<const typename U::Coef*>(w.job.coef);
    LB_UNROLL(1)
    for (int i = lane; i < at.n; i += kLanes) {
      Values<U> s{};
      if (!at.has(i)) {
        for (int k = 0; k < U::kSlots; ++k) w.s[k][i] = 0.0f;
        continue;
      }
      for (int k = 0; k < U::kSlots; ++k) s[k] = w.s[k][i];
      float p = w.p[i], f[2 * kMaxFactors] = {};
      factors_at<U>(w.job, at.row, at.col + i, f);
      update_element<U>(w.g[i], p, s, f, coef);
      w.p[i] = p;
      for (int k = 0; k < U::kSlots; ++k) w.s[k][i] = s[k];
    }
  });
}

__device__ __forceinline__ void store_param(AnyWarp& w, const Chunk& at, int lane) {
  const Job& job = w.job;
  const int64_t first = first_of(job, at, job.front), whole = first_of(job, at, 0);
  visit(job.param_format, ParamFormats{}, [&](auto format) {
    using P = decltype(format);
    auto* out = static_cast<typename P::Storage*>(job.param) + first;
    const int skip = P::kRandom ? draw(w, at, 0, lane) : 0;
    LB_UNROLL(2)
    for (int i = lane; i < at.n; i += kLanes) {
      if (!at.has(i)) continue;
      const int e = skip + i;
      const uint32_t random16 = P::kRandom ? w.random[e >> 3].bits16(e & 7) : 0;
      if constexpr (kHasCompensation<P>) {
        auto* compensation = static_cast<typename P::Compensation*>(job.compensation) + whole;
        typename P::Compensation c = compensation[i];
        out[i] = P::store(w.p[i], random16, c);
        compensation[i] = c;
      } else {
        None none;
        out[i] = P::store(w.p[i], random16, none);
      }
    }
  });
}

}  // namespace lowbit::cuda
