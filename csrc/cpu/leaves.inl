// Included once by each leaves_ISA.cpp, which is compiled for that instruction set and defines
// LOWBIT_LEAVES, the table's name, and LOWBIT_ISA. Plain loops over core's functions; where a
// header of core offers a faster overload for the instruction set (store_block, decode_block,
// encode_block, Drawing), overload resolution takes it. Everything here has internal linkage: the
// object emits one symbol, its table.
#include <cstring>

#include "core/registry.h"
#include "core/scale/block.h"
#include "cpu/leaves.h"
#include "cpu/random.h"

namespace lowbit::cpu {
namespace {

template <class F>
void load(const void* stored, float* out, int n) {
  const auto* in = static_cast<const typename F::Storage*>(stored);
  for (int i = 0; i < n; ++i) out[i] = F::load(in[i]);
}

template <class F, class Storage>
LB_HD void store_block(F, const float* x, Storage* stored, int n, const uint16_t* random16) {
  if constexpr (F::kRandom) {
    for (int i = 0; i < n; ++i) stored[i] = F::store(x[i], random16[i]);
  } else {
    (void)random16;
    for (int i = 0; i < n; ++i) stored[i] = F::store(x[i], 0);
  }
}

template <class F>
void store(const float* x, void* stored, int n, const uint16_t* random16) {
  store_block(F{}, x, static_cast<typename F::Storage*>(stored), n, random16);
}

template <class F, class Codes>
LB_HD void decode_block(F, const Codes* codes, float scale, float* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = F::decode(codes[i]) * scale;
}

template <class F, class Codes>
LB_HD void encode_block(F, const float* x, float inverse, Codes* codes, int n) {
  for (int i = 0; i < n; ++i) codes[i] = static_cast<Codes>(F::encode(x[i] * inverse));
}

uint32_t absmax_bits(const float* x, int n) {
  uint32_t most = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t b = magnitude_bits(x[i]);
    most = b > most ? b : most;
  }
  return most;
}

template <class F>
void decode(const void* codes, const float* scales, int block, float* out, int n) {
  const auto* in = static_cast<const typename F::Storage*>(codes);
  if constexpr (F::kScaled) {
    for (int i = 0, b = 0; i < n; i += block, ++b) {
      const int count = n - i < block ? n - i : block;
      decode_block(F{}, in + i, scales[b], out + i, count);
    }
  } else {
    (void)scales, (void)block;
    for (int i = 0; i < n; ++i) out[i] = F::decode(in[i]);
  }
}

template <class F>
void encode(const float* x, void* codes, float* scales, int block, int n) {
  auto* out = static_cast<typename F::Storage*>(codes);
  if constexpr (F::kScaled) {
    for (int i = 0, b = 0; i < n; i += block, ++b) {
      const int count = n - i < block ? n - i : block;
      const BlockScale scale = BlockScale::of(absmax_bits(x + i, count));
      scales[b] = scale.scale;
      if (scale.coded) {
        encode_block(F{}, x + i, scale.inverse, out + i, count);
      } else {
        std::memset(out + i, static_cast<int>(F::kZeroCode), static_cast<size_t>(count));
      }
    }
  } else {
    (void)scales, (void)block;
    for (int i = 0; i < n; ++i) out[i] = F::encode(x[i]);
  }
}

template <class U>
LB_HD void update_run(const float* __restrict g, float* __restrict p, float* __restrict s0,
                      float* __restrict s1, float* __restrict s2, int n,
                      const typename U::Coef& c) {
  static_assert(U::kSlots <= 3);
  for (int i = 0; i < n; ++i) {
    float state[U::kSlots];
    state[0] = s0[i];
    if constexpr (U::kSlots > 1) state[1] = s1[i];
    if constexpr (U::kSlots > 2) state[2] = s2[i];
    float pi = p[i];
    U::update(g[i], pi, state, c);
    p[i] = pi;
    s0[i] = state[0];
    if constexpr (U::kSlots > 1) s1[i] = state[1];
    if constexpr (U::kSlots > 2) s2[i] = state[2];
  }
}

template <class U>
void update(const float* g, float* p, float* const* s, int n, const void* coef, const Draw* draw) {
  typename U::Coef c;
  std::memcpy(&c, coef, sizeof c);
  float* const s0 = s[0];
  float* const s1 = U::kSlots > 1 ? s[1] : s0;
  float* const s2 = U::kSlots > 2 ? s[2] : s0;
  int i = 0;
  if (draw != nullptr) {
    Drawing drawing(*draw);
    for (; i + 64 <= n && drawing.more(); i += 64) {
      drawing.next();
      update_run<U>(g + i, p + i, s0 + i, s1 + i, s2 + i, 64, c);
    }
    drawing.finish();
  }
  update_run<U>(g + i, p + i, s0 + i, s1 + i, s2 + i, n - i, c);
}

template <class... G>
constexpr void fill_grads(Leaves& l, Types<G...>) {
  int i = 0;
  ((l.load_grad[i++] = load<G>), ...);
}
template <class... P>
constexpr void fill_params(Leaves& l, Types<P...>) {
  int i = 0, j = 0;
  ((l.load_param[i++] = load<P>), ...);
  ((l.store_param[j++] = store<P>), ...);
}
template <class... S>
constexpr void fill_states(Leaves& l, Types<S...>) {
  int i = 0, j = 0;
  ((l.decode[i++] = decode<S>), ...);
  ((l.encode[j++] = encode<S>), ...);
}
template <class... U>
constexpr void fill_rules(Leaves& l, Types<U...>) {
  int i = 0;
  ((l.update[i++] = update<U>), ...);
}

constexpr Leaves make_leaves() {
  Leaves l{};
  l.isa = LOWBIT_ISA;
  fill_grads(l, GradFormats{});
  fill_params(l, ParamFormats{});
  fill_states(l, StateFormats{});
  fill_rules(l, UpdateRules{});
  return l;
}

}  // namespace

constinit const Leaves LOWBIT_LEAVES = make_leaves();

}  // namespace lowbit::cpu
