// Gradient, parameter and rule for a warp that learns them at run time, and a chunk as every pass
// over a job meets it (cpu/tile.cpp).
#pragma once

#include "cuda/slot.cuh"

namespace lowbit::cuda {

template <class P>
constexpr bool kHasExtra = !__is_same(typename P::Extra, None);

__device__ __forceinline__ int slots_of(int rule) {
  int slots = 0;
  visit(rule, UpdateRules{}, [&](auto r) { slots = decltype(r)::kSlots; });
  return slots;
}

/// Gradient, parameter and state of the chunk, in float32.
__device__ __forceinline__ void load_chunk(AnyWarp& w, const Chunk& at, int slots, int lane,
                                           const TablesOf<StateFormats>& tables) {
  const Job& job = w.job;
  const int64_t first = at.row * job.cols + at.col;
  visit(job.grad_format, GradFormats{}, [&](auto format) {
    using G = decltype(format);
    const auto* in = static_cast<const typename G::Storage*>(job.grad) + first;
    for (int i = lane; i < at.n; i += kLanes) w.g[i] = G::load(in[i]);
  });
  visit(job.param_format, ParamFormats{}, [&](auto format) {
    using P = decltype(format);
    const auto* in = static_cast<const typename P::Storage*>(job.param) + first;
    if constexpr (kHasExtra<P>) {
      const auto* extra = static_cast<const typename P::Extra*>(job.extra) + first;
      LB_UNROLL(2)
      for (int i = lane; i < at.n; i += kLanes) w.p[i] = P::load(in[i], extra[i]);
    } else {
      for (int i = lane; i < at.n; i += kLanes) w.p[i] = P::load(in[i], None{});
    }
  });
  LB_UNROLL(1)
  for (int k = 0; k < slots; ++k) decode_slot(w, k, at, lane, tables);
}

/// Which inner row and column of which matrix an element of a row is, for factored moments.
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

/// Row and column factors of one element, as the rule takes them.
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
  const int64_t first = at.row * job.cols + at.col;
  visit(job.param_format, ParamFormats{}, [&](auto format) {
    using P = decltype(format);
    auto* out = static_cast<typename P::Storage*>(job.param) + first;
    const int skip = P::kRandom ? draw(w, at, 0, lane) : 0;
    LB_UNROLL(2)
    for (int i = lane; i < at.n; i += kLanes) {
      const int e = skip + i;
      const uint32_t random16 = P::kRandom ? w.random[e >> 3].bits16(e & 7) : 0;
      if constexpr (kHasExtra<P>) {
        auto* extra = static_cast<typename P::Extra*>(job.extra) + first;
        typename P::Extra beside = extra[i];
        out[i] = P::store(w.p[i], random16, beside);
        extra[i] = beside;
      } else {
        None none;
        out[i] = P::store(w.p[i], random16, none);
      }
    }
  });
}

}  // namespace lowbit::cuda
