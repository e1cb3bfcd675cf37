// Included once by each leaves_ISA.cpp, which is compiled for that instruction set and defines
// LOWBIT_LEAVES, the table's name, and LOWBIT_ISA. Plain loops over core's functions; where a
// header of core offers a faster overload for the instruction set (store_block, decode_block,
// encode_block, Drawing), overload resolution takes it. Everything here has internal linkage: the
// object emits one symbol, its table.
#include <cstring>

#include "core/pack.h"
#include "core/registry.h"
#include "core/state/stochastic.h"
#include "cpu/leaves.h"
#include "cpu/random.h"

namespace lowbit::cpu {
namespace {

// ---- gradients and parameters ----

template <class F>
void load_grad(const void* stored, float* out, int n) {
  const auto* in = static_cast<const typename F::Storage*>(stored);
  for (int i = 0; i < n; ++i) out[i] = F::load(in[i]);
}

template <class F>
constexpr bool kHasExtra = !__is_same(typename F::Extra, None);

template <class F>
void load(const void* stored, const void* extra, float* out, int n) {
  const auto* in = static_cast<const typename F::Storage*>(stored);
  if constexpr (kHasExtra<F>) {
    const auto* beside = static_cast<const typename F::Extra*>(extra);
    for (int i = 0; i < n; ++i) out[i] = F::load(in[i], beside[i]);
  } else {
    (void)extra;
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
void store(const float* x, void* stored, void* extra, int n, const uint16_t* random16) {
  auto* out = static_cast<typename F::Storage*>(stored);
  if constexpr (kHasExtra<F>) {
    auto* beside = static_cast<typename F::Extra*>(extra);
    for (int i = 0; i < n; ++i) out[i] = F::store(x[i], F::kRandom ? random16[i] : 0, beside[i]);
  } else {
    store_block(F{}, x, out, n, random16);
  }
}

// ---- state: codes one to a byte, then packed ----

template <class F, class Codes>
LB_HD void decode_block(F, const Codes* codes, const typename F::Scale& scale, float* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = scale.from_z(F::decode(codes[i]));
}

template <class F, class Codes>
LB_HD void encode_block(F, const float* x, const typename F::Scale& scale, Codes* codes, int n) {
  for (int i = 0; i < n; ++i) codes[i] = static_cast<Codes>(F::encode(scale.to_z(x[i])));
}

/// Magnitudes as signed integers, in the same order: SSE2 compares no others.
int32_t signed_magnitude(float x) { return static_cast<int32_t>(magnitude_bits(x)); }

uint32_t most_bits(const float* x, int n) {
  int32_t most = 0;
  for (int i = 0; i < n; ++i) {
    const int32_t b = signed_magnitude(x[i]);
    most = b > most ? b : most;
  }
  return static_cast<uint32_t>(most);
}

uint32_t least_bits(const float* x, int n) {
  uint32_t least = kNoLeast;
  for (int i = 0; i < n; ++i) {
    const uint32_t b = magnitude_bits(x[i]) - 1;  // zero becomes the largest
    least = b < least ? b : least;
  }
  return least == kNoLeast ? kNoLeast : least + 1;
}

template <class F>
typename F::Scale scale_given(const uint32_t* given) {
  return F::Scale::of(given[0], given[1] == 0 ? kNoLeast : 0x7fffffffu - given[1]);
}

/// The scale of the n values from x[at] on.
template <class F>
typename F::Scale scale_of(const float* x, int at, int n, const float* most) {
  if constexpr (!F::Scale::kNeedsLeast) {
    if (most != nullptr && at % kMostRun == 0 && n % kMostRun == 0)
      return F::Scale::of(most_bits(most + at / kMostRun * kMostLanes, n / kMostRun * kMostLanes),
                          kNoLeast);
  }
  x += at;
  return F::Scale::of(most_bits(x, n), F::Scale::kNeedsLeast ? least_bits(x, n) : kNoLeast);
}

/// The tile's codes, one to an element: those in memory where they are that already, else a buffer.
template <class F>
struct Codes {
  static constexpr bool kPacked = F::kBits < 8;
  using Storage = typename F::Storage;
  Storage buffer[kPacked ? kMostTile : 1];

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
void decode(const void* codes, const void* scales, int block, float* out, int n) {
  if constexpr (F::kScaled) {
    Codes<F> held;
    const auto* in = held.read(codes, n);
    const auto* stored = static_cast<const typename F::Scale::Stored*>(scales);
    for (int i = 0; i < n; i += block, stored += F::Scale::kStored) {
      const int count = n - i < block ? n - i : block;
      decode_block(F{}, in + i, F::Scale::read(stored), out + i, count);
    }
  } else {
    (void)scales, (void)block;
    const auto* in = static_cast<const typename F::Storage*>(codes);
    for (int i = 0; i < n; ++i) out[i] = F::decode(in[i]);
  }
}

template <class F>
void find_scales(const float* x, int block, int n, const uint32_t* given, const float* most,
                 void* stored, BlockScales& found) {
  using Scale = typename F::Scale;
  static_assert(sizeof(Scale) <= sizeof(BlockScales::One) &&
                alignof(Scale) <= alignof(BlockScales::One));
  auto* out = static_cast<typename Scale::Stored*>(stored);
  for (int i = 0, b = 0; i < n; i += block, ++b, out += Scale::kStored) {
    const int count = n - i < block ? n - i : block;
    const Scale scale =
        given != nullptr ? scale_given<F>(given + 2 * b) : scale_of<F>(x, i, count, most);
    scale.write(out);
    std::memcpy(&found.of[b], &scale, sizeof scale);
  }
}

template <class F>
void encode(const float* x, void* codes, const BlockScales& scales, int block, int n,
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
        encode_block(F{}, x + i, scale, out + i, count);
      } else {
        for (int j = 0; j < count; ++j)
          out[i + j] =
              static_cast<Storage>(encode_stochastic<F>(scale.to_z(x[i + j]), random16[i + j]));
      }
    }
    held.write(codes, n);
  } else {
    (void)scales, (void)block;
    auto* out = static_cast<Storage*>(codes);
    if constexpr (requires { F::encode(0.0f, 0u); }) {
      if (random16 != nullptr) {
        for (int i = 0; i < n; ++i) out[i] = F::encode(x[i], random16[i]);
        return;
      }
    }
    for (int i = 0; i < n; ++i) out[i] = F::encode(x[i]);
  }
}

/// Scales of absmax, of which each value may have another: the map alone goes through the fast way,
/// with a scale of 1.
template <class F>
constexpr bool kPlainScale = __is_same(typename F::Scale, BlockScale);
constexpr BlockScale kNoScaling{1.0f, 1.0f, true};

template <class F>
void decode_given(const void* codes, const uint32_t* most, float* out, int n) {
  Codes<F> held;
  const auto* in = held.read(codes, n);
  if constexpr (kPlainScale<F>) {
    decode_block(F{}, in, kNoScaling, out, n);
    for (int i = 0; i < n; ++i) out[i] = out[i] * BlockScale::of(most[i], kNoLeast).scale;
  } else {
    for (int i = 0; i < n; ++i) out[i] = F::Scale::of(most[i], kNoLeast).from_z(F::decode(in[i]));
  }
}

template <class F>
void encode_given(const float* x, void* codes, const uint32_t* most, int n,
                  const uint16_t* random16) {
  using Storage = typename F::Storage;
  Codes<F> held;
  auto* out = held.room(codes);
  if constexpr (kPlainScale<F>) {
    if (random16 == nullptr) {
      float z[kMostTile];
      for (int i = 0; i < n; ++i) z[i] = x[i] * BlockScale::of(most[i], kNoLeast).inverse;
      encode_block(F{}, z, kNoScaling, out, n);
      for (int i = 0; i < n; ++i) {
        const bool coded = most[i] != 0 && most[i] < kInfinityBits;
        out[i] = coded ? out[i] : static_cast<Storage>(F::kZeroCode);
      }
      held.write(codes, n);
      return;
    }
  }
  for (int i = 0; i < n; ++i) {
    const auto scale = F::Scale::of(most[i], kNoLeast);
    const float z = scale.to_z(x[i]);
    const uint32_t code = random16 != nullptr ? encode_stochastic<F>(z, random16[i]) : F::encode(z);
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

void most_of_run(const float* __restrict x, float* __restrict most) {
  for (int j = 0; j < kMostLanes; ++j) {
    int32_t m = signed_magnitude(x[j]);
    for (int i = j + kMostLanes; i < kMostRun; i += kMostLanes) {
      const int32_t b = signed_magnitude(x[i]);
      m = b > m ? b : m;
    }
    most[j] = bits_float(static_cast<uint32_t>(m));
  }
}

template <class U>
void update(const float* g, float* p, float* const* s, const float* const* f, int n,
            const void* coef, const Draw* draw, float* most) {
  typename U::Coef c;
  std::memcpy(&c, coef, sizeof c);
  float* const s0 = s[0];
  float* const s1 = U::kSlots > 1 ? s[1] : s0;
  float* const s2 = U::kSlots > 2 ? s[2] : s0;
  float* const s3 = U::kSlots > 3 ? s[3] : s0;
  int i = 0;
  if constexpr (factors_of<U>() == 0) {
    constexpr int kPart = 8 * Drawing::kGroups;
    static_assert(kMostRun % kPart == 0);
    const auto run = [&](auto between) {
      const int begin = i;
      for (; i < begin + kMostRun; i += kPart) {
        between();
        update_run<U>(g + i, p + i, s0 + i, s1 + i, s2 + i, s3 + i, nullptr, kPart, c);
      }
      if (most == nullptr) return;
      float* at = most + begin / kMostRun * kMostLanes;
      for (int k = 0; k < U::kSlots; ++k) most_of_run(s[k] + begin, at + k * kMostOfSlot);
    };
    if (draw != nullptr) {
      Drawing drawing(*draw);
      while (i + kMostRun <= n && drawing.more()) run([&] { drawing.next(); });
      drawing.finish();
    }
    while (i + kMostRun <= n) run([] {});
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
  const typename U::Coef c = coef;  // what is written below is not the coefficients
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
void add_row(const float* x, int n, ColumnSums& sums, int64_t* words) {
  add_columns(x, n, sums, words);
}

uint32_t most_of_row(const float* x, int n, uint32_t* columns) {
  if (columns == nullptr) return most_bits(x, n);
  uint32_t most = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t b = magnitude_bits(x[i]);
    columns[i] = b > columns[i] ? b : columns[i];
    most = b > most ? b : most;
  }
  return most;
}

// ---- the table ----

template <class... G>
constexpr void fill_grads(Leaves& l, Types<G...>) {
  int i = 0;
  ((l.load_grad[i++] = load_grad<G>), ...);
}
template <class... P>
constexpr void fill_params(Leaves& l, Types<P...>) {
  int i = 0, j = 0;
  ((l.load_param[i++] = load<P>), ...);
  ((l.store_param[j++] = store<P>), ...);
}
template <class S>
constexpr void fill_state(Leaves& l, int i) {
  l.decode[i] = decode<S>;
  l.encode[i] = encode<S>;
  if constexpr (S::kScaled) {
    l.scale[i] = find_scales<S>;
    if constexpr (!S::Scale::kNeedsLeast) {
      l.decode_given[i] = decode_given<S>;
      l.encode_given[i] = encode_given<S>;
    }
  }
}
template <class... S>
constexpr void fill_states(Leaves& l, Types<S...>) {
  int i = 0;
  (fill_state<S>(l, i++), ...);
}
template <class U>
constexpr void fill_rule(Leaves& l, int i) {
  l.update[i] = update<U>;
  if constexpr (rounds_of<U>() > 0) l.measure[i] = measure<U>;
}
template <class... U>
constexpr void fill_rules(Leaves& l, Types<U...>) {
  int i = 0;
  (fill_rule<U>(l, i++), ...);
}

constexpr Leaves make_leaves() {
  static_assert(StateFormats::kCount <= Leaves::kMax && UpdateRules::kCount <= Leaves::kMax &&
                ParamFormats::kCount <= Leaves::kMax);
  Leaves l{};
  l.isa = LOWBIT_ISA;
  fill_grads(l, GradFormats{});
  fill_params(l, ParamFormats{});
  fill_states(l, StateFormats{});
  fill_rules(l, UpdateRules{});
  l.draw = draw_all;
  l.add = add;
  l.add_columns = add_row;
  l.most = most_of_row;
  return l;
}

}  // namespace

constinit const Leaves LOWBIT_LEAVES = make_leaves();

}  // namespace lowbit::cpu
