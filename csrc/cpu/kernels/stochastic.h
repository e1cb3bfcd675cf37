// Stochastic codes of many values, with the codes of core/state/chance/stochastic.h.
//
// The steps of one value are taken for all values of a chunk before the next step: nearest codes,
// their values, the codes on the other side, their values, the choice. Each is a loop that
// compilers vectorize, and formats with a table have loops of their own for the first steps.
#pragma once

#include "core/state/chance/stochastic.h"
#include "core/state/companded8.h"
#include "cpu/kernels.h"

namespace lowbit::cpu {
namespace {

constexpr int kChunk = 256;  // values whose intermediate results stay in the first-level cache

/// Formats with overloads for many values: of codes, and of values, which come from tables.
template <class F>
constexpr bool kCodesOfMany = __is_same(typename F::Scale, BlockScale) &&
                              requires(const float* x, typename F::Storage* codes) {
                                quantize_block(F{}, x, typename F::Scale{}, codes, 1);
                              };
template <class F>
constexpr bool kValuesOfMany = kCodesOfMany<F> || __is_same(F, Companded8);

/// Whether the next value up has the next code up: not where codes are a sign and a magnitude.
/// Ascending codes from kFirst to kLast are written.
template <class F>
constexpr bool kAscending = F::kBits != 8 || F::neighbour(129, true) == 130;
template <class F>
constexpr int kLast = [] {
  int code = (1 << F::kBits) - 1;
  while (F::neighbour(static_cast<uint32_t>(code) - 1, true) != static_cast<uint32_t>(code)) --code;
  return code;
}();
template <class F>
constexpr int kFirst = [] {
  int code = 0;
  while (F::neighbour(static_cast<uint32_t>(code) + 1, false) != static_cast<uint32_t>(code))
    ++code;
  return code;
}();

/// far = the code next to `near` on the side of z, or `near` at either end.
template <class Storage>
__attribute__((noinline)) void other_codes(const float* z, const float* v, const Storage* near,
                                           int first, int last, Storage* far, int n) {
  for (int i = 0; i < n; ++i) {
    const int code = near[i];
    const int up = code < last ? code + 1 : code, down = code > first ? code - 1 : code;
    far[i] = static_cast<Storage>(z[i] > v[i] ? up : down);
  }
}

/// The same for codes of a sign and a magnitude from `first` to `last`.
__attribute__((noinline)) void other_signed_codes(const float* z, const float* v,
                                                  const uint8_t* near, int first, int last,
                                                  uint8_t* far, int n) {
  for (int i = 0; i < n; ++i) {
    const int magnitude = near[i] & 0x7f, code = near[i] > 0x7f ? -magnitude : magnitude;
    const int up = code < last ? code + 1 : code, down = code > first ? code - 1 : code;
    const int other = z[i] > v[i] ? up : down;
    far[i] = static_cast<uint8_t>(other < 0 ? 0x80 - other : other);
  }
}

/// What a choice reads: z, and the values v and w of both codes, as z and as the numbers in which
/// the chance is linear.
struct Sides {
  const float *z, *v, *w, *x, *from, *to;
};
template <class Storage>
__attribute__((noinline)) void choose(const Sides& sides, bool is_signed, const uint16_t* random16,
                                      const Storage* near, const Storage* far, Storage* codes,
                                      int n) {
  const float* __restrict z = sides.z;
  const float* __restrict v = sides.v;
  const float* __restrict w = sides.w;
  const float* __restrict x = sides.x;
  const float* __restrict from = sides.from;
  const float* __restrict to = sides.to;
  const float never = is_signed ? bits_float(kCanonicalNan) : 0.0f;
  // In two loops: with lanes of 8, 16 and 32 bits in one, AVX2 has too few registers.
  alignas(64) uint32_t taken[kChunk];
  for (int i = 0; i < n; ++i) {
    const float share = (x[i] - from[i]) / (to[i] - from[i]);
    const auto apart = static_cast<uint32_t>(z[i] < v[i]) | static_cast<uint32_t>(z[i] > v[i]);
    const auto goes = static_cast<uint32_t>(!(w[i] == never));
    const float drawn = static_cast<float>(static_cast<int32_t>(random16[i])) + 0.5f;
    taken[i] = 0u - (apart & goes & static_cast<uint32_t>(drawn < share * 65536.0f));
  }
  for (int i = 0; i < n; ++i) {
    const auto change = static_cast<Storage>((near[i] ^ far[i]) & static_cast<Storage>(taken[i]));
    codes[i] = static_cast<Storage>(near[i] ^ change);
  }
}

/// The codes of n <= kChunk values x with z = to_z(x). from_z(i, z): the value at i.
template <class F, class FromZ>
LB_HD void stochastic_chunk(const float* x, const float* z, const FromZ& from_z,
                            const uint16_t* random16, typename F::Storage* codes, int n) {
  using Storage = typename F::Storage;
  alignas(64) float v[kChunk], w[kChunk], from[kChunk], to[kChunk];
  alignas(64) Storage near[kChunk], far[kChunk];
  const auto values = [&](const Storage* of, float* out) {
    if constexpr (kValuesOfMany<F>) {
      dequantize_block(F{}, of, typename F::Scale{1.0f, 1.0f, true}, out, n);
    } else {
      for (int i = 0; i < n; ++i) out[i] = F::dequantize(of[i]);
    }
  };
  if constexpr (kCodesOfMany<F>) {
    quantize_block(F{}, z, typename F::Scale{1.0f, 1.0f, true}, near, n);
  } else {
    for (int i = 0; i < n; ++i) near[i] = static_cast<Storage>(F::quantize(z[i]));
  }
  values(near, v);
  if constexpr (kAscending<F>) {
    other_codes(z, v, near, kFirst<F>, kLast<F>, far, n);
  } else {
    other_signed_codes(z, v, near, F::kSigned ? -F::kTop : 1, F::kTop, far, n);
  }
  values(far, w);
  Sides sides{z, v, w, z, v, w};
  if constexpr (is_curved<typename F::Scale>()) {
    for (int i = 0; i < n; ++i) from[i] = from_z(i, v[i]);
    for (int i = 0; i < n; ++i) to[i] = from_z(i, w[i]);
    sides.x = x, sides.from = from, sides.to = to;
  }
  choose(sides, F::kSigned, random16, near, far, codes, n);
}

/// codes[i] = quantize_stochastic<F>(scale, x[i], random16[i])
template <class F>
void quantize_stochastic_block(const float* x, const typename F::Scale& given,
                               const uint16_t* random16, typename F::Storage* codes, int n) {
  const typename F::Scale scale = given;
  if constexpr (requires { quantize_block_by_chance(F{}, x, scale, random16, codes, n); }) {
    bool fits = true;
    if constexpr (requires { by_chance_fits(F{}, scale); }) fits = by_chance_fits(F{}, scale);
    if (fits) {
      quantize_block_by_chance(F{}, x, scale, random16, codes, n);
      return;
    }
  }
  alignas(64) float z[kChunk];
  for (int i = 0; i < n; i += kChunk) {
    const int count = n - i < kChunk ? n - i : kChunk;
    for (int j = 0; j < count; ++j) z[j] = scale.to_z(x[i + j]);
    stochastic_chunk<F>(
        x + i, z, [&](int, float at) { return scale.from_z(at); }, random16 + i, codes + i, count);
  }
}

}  // namespace
}  // namespace lowbit::cpu
