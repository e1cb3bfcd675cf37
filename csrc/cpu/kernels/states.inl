// The kernels of state formats, for the states_ISA.cpp, which define LOWBIT_STATES. As values.inl; the
// overloads of core are dequantize_block and quantize_block.
#include <cstring>

#include "core/pack.h"
#include "core/state/chance/stochastic.h"
#include "core/state/registry.h"
#include "cpu/kernels.h"
#include "cpu/kernels/magnitude.h"
#include "cpu/kernels/stochastic.h"

namespace lowbit::cpu {
namespace {

// ---- one code per byte, then packed ----

template <class F, class Codes>
LB_HD void dequantize_block(F, const Codes* codes, const typename F::Scale& scale, float* out,
                            int n) {
  for (int i = 0; i < n; ++i) out[i] = scale.from_z(F::dequantize(codes[i]));
}

template <class F, class Codes>
LB_HD void quantize_block(F, const float* x, const typename F::Scale& scale, Codes* codes, int n) {
  for (int i = 0; i < n; ++i) codes[i] = static_cast<Codes>(F::quantize(scale.to_z(x[i])));
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

// ---- the table ----

template <class S>
constexpr void fill_state(StateKernels& l, int i) {
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
constexpr void fill_states(StateKernels& l, Types<S...>) {
  int i = 0;
  (fill_state<S>(l, i++), ...);
}

constexpr StateKernels make_states() {
  static_assert(StateFormats::kCount <= kMaxKernels);
  StateKernels l{};
  fill_states(l, StateFormats{});
  return l;
}

}  // namespace

constinit const StateKernels LOWBIT_STATES = make_states();

}  // namespace lowbit::cpu
