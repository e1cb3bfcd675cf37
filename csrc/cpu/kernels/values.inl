// The kernels of gradients, parameters, random bits and sums. Each values_ISA.cpp includes this file
// once: it is compiled for that instruction set and defines LOWBIT_VALUES, the name of the table. The
// kernels are plain loops over core's functions. If a header of core has a faster overload for the
// instruction set (store_block, Drawing), overload resolution selects it. Everything here has
// internal linkage, so the object emits one symbol, the table.
#include "core/exact_sum.h"
#include "core/grad.h"
#include "core/mean_bins_loop.h"
#include "core/param/registry.h"
#include "cpu/kernels.h"
#include "cpu/kernels/magnitude.h"
#include "cpu/kernels/random.h"

namespace lowbit::cpu {
namespace {

// ---- gradients and parameters ----

template <class F>
void load_grad(const void* stored, float* out, int n) {
  const auto* in = static_cast<const typename F::Storage*>(stored);
  for (int i = 0; i < n; ++i) out[i] = F::load(in[i]);
}

template <class F>
constexpr bool kHasCompensation = !__is_same(typename F::Compensation, None);

template <class F>
void load(const void* stored, const void* compensation, float* out, int n) {
  const auto* in = static_cast<const typename F::Storage*>(stored);
  if constexpr (kHasCompensation<F>) {
    const auto* c = static_cast<const typename F::Compensation*>(compensation);
    for (int i = 0; i < n; ++i) out[i] = F::load(in[i], c[i]);
  } else {
    (void)compensation;
    for (int i = 0; i < n; ++i) out[i] = F::load(in[i], None{});
  }
}

template <class F, class Storage>
LB_HD void store_block(F, const float* x, Storage* stored, int n, const uint16_t* random16) {
  None none;
  if constexpr (F::kRandom) {
    for (int i = 0; i < n; ++i) stored[i] = F::store(x[i], random16[i], none);
  } else {
    (void)random16;
    for (int i = 0; i < n; ++i) stored[i] = F::store(x[i], 0, none);
  }
}

template <class F>
void store(const float* x, void* stored, void* compensation, int n, const uint16_t* random16) {
  auto* out = static_cast<typename F::Storage*>(stored);
  if constexpr (kHasCompensation<F>) {
    auto* c = static_cast<typename F::Compensation*>(compensation);
    for (int i = 0; i < n; ++i) out[i] = F::store(x[i], F::kRandom ? random16[i] : 0, c[i]);
  } else {
    store_block(F{}, x, out, n, random16);
  }
}

// ---- random bits and sums ----

void draw_all(const Draw& draw) {
  Drawing drawing(draw);
  drawing.finish();
}

void add(const float* x, int n, int64_t* words) { exact_add(x, n, words); }
void add_rows(const float* x, int stride, int rows, int n, ColumnSums& sums, int64_t* words) {
  add_columns(x, stride, rows, n, sums, words);
}

void add_bins(uint64_t* words, const float* x, int n, int width) {
  for (; n > 0; words += kBinTile, x += kBinTile, n -= kBinTile)
    bin_add_tile(words, x, n < kBinTile ? n : kBinTile, width);
}

void mean_bins(const uint64_t* words, float* means, int n, int width, int64_t divisor, bool odd) {
#if defined(__AVX2__)
  for (; n > 0; words += kBinTile, means += kBinTile, n -= kBinTile)
    bin_mean_tile(words, means, n < kBinTile ? n : kBinTile, width, divisor, odd);
#else  // vectors of two doubles gain nothing over integers
  for (int i = 0; i < n; ++i) means[i] = bin_mean(words[i], width, divisor, odd);
#endif
}

uint32_t absmax_of_row(const float* x, int n, uint32_t* columns) {
  if (columns == nullptr) return absmax_bits(x, n);
  uint32_t absmax = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t b = magnitude_bits(x[i]);
    columns[i] = b > columns[i] ? b : columns[i];
    absmax = b > absmax ? b : absmax;
  }
  return absmax;
}

// ---- the table ----

template <class... G>
constexpr void fill_grads(ValueKernels& l, Types<G...>) {
  int i = 0;
  ((l.load_grad[i++] = load_grad<G>), ...);
}
template <class... P>
constexpr void fill_params(ValueKernels& l, Types<P...>) {
  int i = 0, j = 0;
  ((l.load_param[i++] = load<P>), ...);
  ((l.store_param[j++] = store<P>), ...);
}

constexpr ValueKernels make_values() {
  static_assert(ParamFormats::kCount <= kMaxKernels);
  ValueKernels l{};
  fill_grads(l, GradFormats{});
  fill_params(l, ParamFormats{});
  l.draw = draw_all;
  l.add = add;
  l.add_columns = add_rows;
  l.absmax = absmax_of_row;
  l.add_bins = add_bins;
  l.mean_bins = mean_bins;
  return l;
}

}  // namespace

constinit const ValueKernels LOWBIT_VALUES = make_values();

}  // namespace lowbit::cpu
