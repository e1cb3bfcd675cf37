// The definitions of the kernels. Each kernels_ISA.cpp includes this file once: it is compiled for
// that instruction set and defines LOWBIT_KERNELS, the name of the table, and LOWBIT_ISA. The
// kernels are plain loops over core's functions. If a header of core has a faster overload for the
// instruction set (store_block, dequantize_block, quantize_block, Drawing), overload resolution
// selects it. Everything here has internal linkage, so the object emits one symbol, the table.
#include <cstring>

#include "core/mean_bins_loop.h"
#include "core/pack.h"
#include "core/registry.h"
#include "core/state/chance/stochastic.h"
#include "cpu/kernels.h"
#include "cpu/random.h"
#include "cpu/stochastic.h"

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

// ---- state: one code per byte, then packed ----

template <class F, class Codes>
LB_HD void dequantize_block(F, const Codes* codes, const typename F::Scale& scale, float* out,
                            int n) {
  for (int i = 0; i < n; ++i) out[i] = scale.from_z(F::dequantize(codes[i]));
}

template <class F, class Codes>
LB_HD void quantize_block(F, const float* x, const typename F::Scale& scale, Codes* codes, int n) {
  for (int i = 0; i < n; ++i) codes[i] = static_cast<Codes>(F::quantize(scale.to_z(x[i])));
}

/// Magnitudes as signed integers in the same order: SSE2 compares signed integers only.
int32_t signed_magnitude(float x) { return static_cast<int32_t>(magnitude_bits(x)); }

uint32_t absmax_bits(const float* x, int n) {
  int32_t absmax = 0;
  for (int i = 0; i < n; ++i) {
    const int32_t b = signed_magnitude(x[i]);
    absmax = b > absmax ? b : absmax;
  }
  return static_cast<uint32_t>(absmax);
}

uint32_t absmin_bits(const float* x, int n) {
  uint32_t absmin = kNoMin;
  for (int i = 0; i < n; ++i) {
    const uint32_t b = magnitude_bits(x[i]) - 1;  // zero becomes the largest
    absmin = b < absmin ? b : absmin;
  }
  return absmin == kNoMin ? kNoMin : absmin + 1;
}

template <class F>
typename F::Scale scale_given(const uint32_t* given) {
  return F::Scale::of(given[0], given[1] == 0 ? kNoMin : 0x7fffffffu - given[1]);
}

/// The scale of the n values that begin at x[at].
template <class F>
typename F::Scale scale_of(const float* x, int at, int n, const float* absmax) {
  if constexpr (!F::Scale::kNeedsMin) {
    if (absmax != nullptr && at % kMaxRun == 0 && n % kMaxRun == 0)
      return F::Scale::of(absmax_bits(absmax + at / kMaxRun * kMaxLanes, n / kMaxRun * kMaxLanes),
                          kNoMin);
  }
  x += at;
  return F::Scale::of(absmax_bits(x, n), F::Scale::kNeedsMin ? absmin_bits(x, n) : kNoMin);
}

/// The codes of the tile, one per element: in memory if they are stored that way, else in a buffer.
template <class F>
struct Codes {
  static constexpr bool kPacked = F::kBits < 8;
  using Storage = typename F::Storage;
  Storage buffer[kPacked ? kMaxTile : 1];

  const Storage* read(const void* memory, int n) {
    if constexpr (kPacked) {
      unpack<F::kBits>(static_cast<const uint8_t*>(memory), buffer, n);
      return buffer;
    } else {
      return static_cast<const Storage*>(memory);
    }
  }
  Storage* room(void* memory) {
    if constexpr (kPacked) {
      return buffer;
    } else {
      return static_cast<Storage*>(memory);
    }
  }
  void write(void* memory, int n) const {
    if constexpr (kPacked) pack<F::kBits>(buffer, static_cast<uint8_t*>(memory), n);
  }
};

template <class F>
void dequantize(const void* codes, const void* scales, int block, float* out, int n) {
  if constexpr (F::kScaled) {
    Codes<F> held;
    const auto* in = held.read(codes, n);
    const auto* stored = static_cast<const typename F::Scale::Stored*>(scales);
    for (int i = 0; i < n; i += block, stored += F::Scale::kStored) {
      const int count = n - i < block ? n - i : block;
      dequantize_block(F{}, in + i, F::Scale::read(stored), out + i, count);
    }
  } else {
    (void)scales, (void)block;
    const auto* in = static_cast<const typename F::Storage*>(codes);
    for (int i = 0; i < n; ++i) out[i] = F::dequantize(in[i]);
  }
}

template <class F>
void find_scales(const float* x, int block, int n, const uint32_t* given, const float* absmax,
                 void* stored, BlockScales& found) {
  using Scale = typename F::Scale;
  static_assert(sizeof(Scale) <= sizeof(BlockScales::One) &&
                alignof(Scale) <= alignof(BlockScales::One));
  auto* out = static_cast<typename Scale::Stored*>(stored);
  for (int i = 0, b = 0; i < n; i += block, ++b, out += Scale::kStored) {
    const int count = n - i < block ? n - i : block;
    const Scale scale =
        given != nullptr ? scale_given<F>(given + 2 * b) : scale_of<F>(x, i, count, absmax);
    scale.write(out);
    std::memcpy(&found.of[b], &scale, sizeof scale);
  }
}

template <class F>
void quantize(const float* x, void* codes, const BlockScales& scales, int block, int n,
              const uint16_t* random16) {
  using Storage = typename F::Storage;
  if constexpr (F::kScaled) {
    Codes<F> held;
    auto* out = held.room(codes);
    for (int i = 0, b = 0; i < n; i += block, ++b) {
      const int count = n - i < block ? n - i : block;
      typename F::Scale scale;
      std::memcpy(&scale, &scales.of[b], sizeof scale);
      if (!scale.coded) {
        for (int j = 0; j < count; ++j) out[i + j] = static_cast<Storage>(F::kZeroCode);
      } else if (random16 == nullptr) {
        quantize_block(F{}, x + i, scale, out + i, count);
      } else {
        quantize_stochastic_block<F>(x + i, scale, random16 + i, out + i, count);
      }
    }
    held.write(codes, n);
  } else {
    (void)scales, (void)block;
    auto* out = static_cast<Storage*>(codes);
    if constexpr (requires { F::quantize(0.0f, 0u); }) {
      if (random16 != nullptr) {
        for (int i = 0; i < n; ++i) out[i] = F::quantize(x[i], random16[i]);
        return;
      }
    }
    for (int i = 0; i < n; ++i) out[i] = F::quantize(x[i]);
  }
}

/// One scale per value, given by its absmax. The fast path serves the map alone, with a scale of 1.
template <class F>
constexpr bool kPlainScale = __is_same(typename F::Scale, BlockScale);
constexpr BlockScale kNoScaling{1.0f, 1.0f, true};

template <class F>
void dequantize_given(const void* codes, const uint32_t* absmax, float* out, int n) {
  Codes<F> held;
  const auto* in = held.read(codes, n);
  if constexpr (kPlainScale<F>) {
    dequantize_block(F{}, in, kNoScaling, out, n);
    for (int i = 0; i < n; ++i) out[i] = out[i] * BlockScale::of(absmax[i], kNoMin).scale;
  } else {
    for (int i = 0; i < n; ++i)
      out[i] = F::Scale::of(absmax[i], kNoMin).from_z(F::dequantize(in[i]));
  }
}

template <class F>
void quantize_given(const float* x, void* codes, const uint32_t* absmax, int n,
                    const uint16_t* random16) {
  using Storage = typename F::Storage;
  Codes<F> held;
  auto* out = held.room(codes);
  if constexpr (kPlainScale<F>) {
    float z[kMaxTile];
    for (int i = 0; i < n; ++i) z[i] = x[i] * BlockScale::of(absmax[i], kNoMin).inverse;
    if (random16 == nullptr) {
      quantize_block(F{}, z, kNoScaling, out, n);
    } else {
      quantize_stochastic_block<F>(z, kNoScaling, random16, out, n);
    }
    for (int i = 0; i < n; ++i) {
      const bool coded = absmax[i] != 0 && absmax[i] < kInfinityBits;
      out[i] = coded ? out[i] : static_cast<Storage>(F::kZeroCode);
    }
    held.write(codes, n);
    return;
  }
  for (int i = 0; i < n; ++i) {
    const auto scale = F::Scale::of(absmax[i], kNoMin);
    const uint32_t code = random16 != nullptr ? quantize_stochastic<F>(scale, x[i], random16[i])
                                              : F::quantize(scale.to_z(x[i]));
    out[i] = static_cast<Storage>(scale.coded ? code : F::kZeroCode);
  }
  held.write(codes, n);
}

// ---- rules ----

template <class U>
LB_HD void update_run(const float* __restrict g, float* __restrict p, float* __restrict s0,
                      float* __restrict s1, float* __restrict s2, float* __restrict s3,
                      const float* const* f, int n, const typename U::Coef& c) {
  static_assert(U::kSlots <= 4 && kMaxSlots == 4 && kMaxFactors == 2);
  constexpr int kF = 2 * factors_of<U>();
  const float* __restrict f0 = kF > 0 ? f[0] : nullptr;
  const float* __restrict f1 = kF > 0 ? f[1] : nullptr;
  const float* __restrict f2 = kF > 2 ? f[2] : nullptr;
  const float* __restrict f3 = kF > 2 ? f[3] : nullptr;
  for (int i = 0; i < n; ++i) {
    Values<U> state{};
    if constexpr (U::kSlots > 0) state[0] = s0[i];
    if constexpr (U::kSlots > 1) state[1] = s1[i];
    if constexpr (U::kSlots > 2) state[2] = s2[i];
    if constexpr (U::kSlots > 3) state[3] = s3[i];
    float factor[4] = {};
    if constexpr (kF > 0) factor[0] = f0[i], factor[1] = f1[i];
    if constexpr (kF > 2) factor[2] = f2[i], factor[3] = f3[i];
    float pi = p[i];
    update_element<U>(g[i], pi, state, factor, c);
    p[i] = pi;
    if constexpr (U::kSlots > 0) s0[i] = state[0];
    if constexpr (U::kSlots > 1) s1[i] = state[1];
    if constexpr (U::kSlots > 2) s2[i] = state[2];
    if constexpr (U::kSlots > 3) s3[i] = state[3];
  }
}

void draw_all(const Draw& draw) {
  Drawing drawing(draw);
  drawing.finish();
}

void absmax_of_run(const float* __restrict x, float* __restrict absmax) {
  for (int j = 0; j < kMaxLanes; ++j) {
    int32_t m = signed_magnitude(x[j]);
    for (int i = j + kMaxLanes; i < kMaxRun; i += kMaxLanes) {
      const int32_t b = signed_magnitude(x[i]);
      m = b > m ? b : m;
    }
    absmax[j] = bits_float(static_cast<uint32_t>(m));
  }
}

template <class U>
void update(const float* g, float* p, float* const* s, const float* const* f, int n,
            const void* coef, const Draw* draw, float* absmax) {
  typename U::Coef c;
  std::memcpy(&c, coef, sizeof c);
  float* const s0 = s[0];
  float* const s1 = U::kSlots > 1 ? s[1] : s0;
  float* const s2 = U::kSlots > 2 ? s[2] : s0;
  float* const s3 = U::kSlots > 3 ? s[3] : s0;
  int i = 0;
  if constexpr (factors_of<U>() == 0) {
    constexpr int kPart = 8 * Drawing::kGroups;
    static_assert(kMaxRun % kPart == 0);
    const auto run = [&](auto between) {
      const int begin = i;
      for (; i < begin + kMaxRun; i += kPart) {
        between();
        update_run<U>(g + i, p + i, s0 + i, s1 + i, s2 + i, s3 + i, nullptr, kPart, c);
      }
      if (absmax == nullptr) return;
      float* at = absmax + begin / kMaxRun * kMaxLanes;
      for (int k = 0; k < U::kSlots; ++k) absmax_of_run(s[k] + begin, at + k * kMaxOfSlot);
    };
    if (draw != nullptr) {
      Drawing drawing(*draw);
      while (i + kMaxRun <= n && drawing.more()) run([&] { drawing.next(); });
      drawing.finish();
    }
    while (i + kMaxRun <= n) run([] {});
  } else if (draw != nullptr) {
    draw_all(*draw);
  }
  update_run<U>(g + i, p + i, s0 + i, s1 + i, s2 + i, s3 + i, f, n - i, c);
}

template <class U, int kRound>
void measure_round(const float* __restrict g, const float* __restrict p, const float* const* s,
                   const float* const* f, int n, const typename U::Coef& coef,
                   float* __restrict grid, float* const* totals) {
  static_assert(kMaxTotals == 2);
  constexpr int kF = 2 * factors_of<U>();
  const typename U::Coef c = coef;  // a local copy, which the stores below cannot alias
  const float* __restrict s0 = U::kSlots > 0 ? s[0] : nullptr;
  const float* __restrict s1 = U::kSlots > 1 ? s[1] : nullptr;
  const float* __restrict s2 = U::kSlots > 2 ? s[2] : nullptr;
  const float* __restrict s3 = U::kSlots > 3 ? s[3] : nullptr;
  const float* __restrict f0 = kF > 0 ? f[0] : nullptr;
  const float* __restrict f1 = kF > 0 ? f[1] : nullptr;
  const float* __restrict f2 = kF > 2 ? f[2] : nullptr;
  const float* __restrict f3 = kF > 2 ? f[3] : nullptr;
  float* __restrict total0 = totals[0];
  float* __restrict total1 = totals[1];
  for (int i = 0; i < n; ++i) {
    Values<U> state{};
    if constexpr (U::kSlots > 0) state[0] = s0[i];
    if constexpr (U::kSlots > 1) state[1] = s1[i];
    if constexpr (U::kSlots > 2) state[2] = s2[i];
    if constexpr (U::kSlots > 3) state[3] = s3[i];
    float factor[4] = {};
    if constexpr (kF > 0) factor[0] = f0[i], factor[1] = f1[i];
    if constexpr (kF > 2) factor[2] = f2[i], factor[3] = f3[i];
    float x = 0.0f, sum[kMaxTotals] = {};
    U::template measure<kRound>(g[i], p[i], state, factor, c, x, sum);
    if constexpr (U::grid_factor(kRound) >= 0) grid[i] = x;
    if constexpr (U::totals(kRound) > 0) total0[i] = sum[0];
    if constexpr (U::totals(kRound) > 1) total1[i] = sum[1];
  }
}

template <class U>
void measure(int round, const float* g, const float* p, const float* const* s,
             const float* const* f, int n, const void* coef, float* grid, float* const* totals) {
  static_assert(rounds_of<U>() <= 3);
  typename U::Coef c;
  std::memcpy(&c, coef, sizeof c);
  if (round == 0) measure_round<U, 0>(g, p, s, f, n, c, grid, totals);
  if constexpr (rounds_of<U>() > 1) {
    if (round == 1) measure_round<U, 1>(g, p, s, f, n, c, grid, totals);
  }
  if constexpr (rounds_of<U>() > 2) {
    if (round == 2) measure_round<U, 2>(g, p, s, f, n, c, grid, totals);
  }
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
constexpr void fill_grads(Kernels& l, Types<G...>) {
  int i = 0;
  ((l.load_grad[i++] = load_grad<G>), ...);
}
template <class... P>
constexpr void fill_params(Kernels& l, Types<P...>) {
  int i = 0, j = 0;
  ((l.load_param[i++] = load<P>), ...);
  ((l.store_param[j++] = store<P>), ...);
}
template <class S>
constexpr void fill_state(Kernels& l, int i) {
  l.dequantize[i] = dequantize<S>;
  l.quantize[i] = quantize<S>;
  if constexpr (S::kScaled) {
    l.scale[i] = find_scales<S>;
    if constexpr (!S::Scale::kNeedsMin) {
      l.dequantize_given[i] = dequantize_given<S>;
      l.quantize_given[i] = quantize_given<S>;
    }
  }
}
template <class... S>
constexpr void fill_states(Kernels& l, Types<S...>) {
  int i = 0;
  (fill_state<S>(l, i++), ...);
}
template <class U>
constexpr void fill_rule(Kernels& l, int i) {
  l.update[i] = update<U>;
  if constexpr (rounds_of<U>() > 0) l.measure[i] = measure<U>;
}
template <class... U>
constexpr void fill_rules(Kernels& l, Types<U...>) {
  int i = 0;
  (fill_rule<U>(l, i++), ...);
}

constexpr Kernels make_kernels() {
  static_assert(StateFormats::kCount <= Kernels::kMax && UpdateRules::kCount <= Kernels::kMax &&
                ParamFormats::kCount <= Kernels::kMax);
  Kernels l{};
  l.isa = LOWBIT_ISA;
  fill_grads(l, GradFormats{});
  fill_params(l, ParamFormats{});
  fill_states(l, StateFormats{});
  fill_rules(l, UpdateRules{});
  l.draw = draw_all;
  l.add = add;
  l.add_columns = add_rows;
  l.absmax = absmax_of_row;
  l.add_bins = add_bins;
  l.mean_bins = mean_bins;
  return l;
}

}  // namespace

constinit const Kernels LOWBIT_KERNELS = make_kernels();

}  // namespace lowbit::cpu
