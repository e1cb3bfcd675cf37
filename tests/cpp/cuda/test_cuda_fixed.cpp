// The parts of the fixed CUDA kernels that reach a result by another way than core does: codes by
// cells, 8-bit floats by tables, and parameters by a bracket. Core's plain functions are the
// reference. `test_cuda_fixed all` tries every float
// from 2^-33 on.
#include "cuda_emulator.h"

#pragma GCC diagnostic ignored "-Wunused-function"  // kernels that are not launched here

// after the emulator
#include <cmath>
#include <vector>

#include "check.h"
#include "cuda/step/step.cuh"

namespace lowbit {
namespace {

/// As `check`, which makes a text of its arguments: that would take longer than what is checked.
void check(bool good, const char* what, const char* name) {
  if (good)
    ++passed;
  else
    ::check(false, std::string(name) + ": " + what);
}

/// Numbers that repeat.
struct Numbers {
  uint64_t state = 88172645463325252u;
  uint32_t next() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<uint32_t>(state >> 16);
  }
  float uniform() { return static_cast<float>(next() >> 8) * 0x1p-24f; }
  /// A float of either sign between two powers of two.
  float between(int low, int high) {
    const uint32_t exponent =
        static_cast<uint32_t>(127 + low) + next() % static_cast<uint32_t>(high - low);
    return bits_float((next() & 0x807fffffu) | exponent << 23);
  }
};

template <class F>
struct Codes {
  using Fixed = cuda::Fixed<F>;
  static constexpr bool kIsTop = F::kScaled && __is_same(typename F::Scale, TopScale<448>);
  static constexpr float kTop = 448.0f;
  typename Fixed::Tables tables;
  static constexpr uint32_t kLeast = float_bits(0x1p-12f);  // for formats that need it
  const typename F::Scale scale = F::Scale::of(float_bits(kIsTop ? kTop : 1.0f), kLeast);
  const typename Fixed::Encoder encoder =
      cuda::encoder_of<F>(float_bits(kIsTop ? kTop : 1.0f), ~kLeast);
  float x[cuda::kEach] = {};
  uint32_t expected[cuda::kEach] = {};
  int held = 0;
  int64_t wrong = 0;

  Codes() { Fixed::fill(tables, 0, 1); }

  /// The scale is 1.
  void add(float value) {
    if (magnitude_bits(value) > float_bits(kIsTop ? kTop : 1.0f) + 2) return;
    x[held] = value;
    expected[held++] = F::quantize(scale.to_z(value));
    if (held == cuda::kEach) flush();
  }
  void flush() {
    cuda::StatePack<F> pack;
    pack.clear();
    encoder.quantize(x, tables, pack);
    for (int e = 0; e < held; ++e) {
      const auto code = static_cast<uint32_t>(pack.get(e));
      if (code != expected[e] && wrong++ < 3)
        std::printf("%s: %a has %u, not %u\n", F::kName, x[e], code, expected[e]);
    }
    held = 0;
  }
  void add_both(uint32_t bits) {
    add(bits_float(bits));
    add(bits_float(bits | 0x80000000u));
  }
};

template <class F>
void test_codes(bool all) {
  Codes<F> codes;
  const uint32_t end = float_bits(Codes<F>::kIsTop ? Codes<F>::kTop : 1.0f) + 2;
  if (all) {
    for (uint32_t b = float_bits(0x1p-33f); b <= end; ++b) codes.add_both(b);
  }
  // Around every middle of two values; the ends of every cell; and scattered.
  float last = 0.0f;
  for (uint32_t code = 0; code < 1u << F::kBits; ++code) {
    const float value = F::dequantize(code);
    if (is_nan_bits(float_bits(value))) continue;
    const uint32_t middle =
        magnitude_bits(static_cast<float>((static_cast<double>(value) + last) / 2));
    for (uint32_t d = 0; d <= 8; ++d) {
      codes.add_both(middle + d - 4);
      codes.add_both(magnitude_bits(value) + d - 4);
    }
    last = value;
  }
  for (uint32_t cell = 0; cell <= end >> 16; ++cell) {
    for (uint32_t low : {0u, 1u, 2u, 0x7fffu, 0x8000u, 0xfffeu, 0xffffu})
      codes.add_both(cell << 16 | low);
  }
  Numbers numbers;
  for (int i = 0; i < 1 << 20; ++i) codes.add_both(numbers.next() % end);
  codes.flush();
  check(codes.wrong == 0, "codes of floats", F::kName);

  bool same = true;
  for (uint32_t first = 0; first < 1u << F::kBits; first += cuda::kEach) {
    cuda::StatePack<F> pack;
    pack.clear();
    for (int e = 0; e < cuda::kEach; ++e)
      pack.set(e, static_cast<uint8_t>(first + static_cast<uint32_t>(e)));
    float z[cuda::kEach];
    cuda::Fixed<F>::dequantize(pack, codes.tables, z);
    for (uint32_t e = 0; e < cuda::kEach; ++e)
      same &= float_bits(canonical(z[e])) == float_bits(canonical(F::dequantize(first + e)));
  }
  check(same, "values of codes", F::kName);
}

/// Scales of any absmax, and codes of blocks without any.
template <class F>
void test_scales() {
  typename cuda::Fixed<F>::Tables tables;
  cuda::Fixed<F>::fill(tables, 0, 1);
  const uint32_t absmax[] = {0,           1,          0x007fffffu, 0x00800000u, 0x0d7fffffu,
                             0x0d800000u, 0x17000000, 0x27800000,  0x33000000,  0x33000001,
                             0x387fffff,  0x3f800000, 0x3f801fff,  0x43e00000,  0x477fe000,
                             0x477fefff,  0x477ff000, 0x4f7fe000,  0x4f800000,  0x71800000u,
                             0x72000000u, 0x7f7fffff, 0x7f800000,  0x7fc00000u, 0x7fffffffu};
  bool same = true;
  for (uint32_t most : absmax) {
    const uint32_t least = most > 0x01000000u ? most - 0x01000000u : most;
    const auto scale = F::Scale::of(most, least);
    const auto encoder = cuda::encoder_of<F>(most, ~least);
    typename F::Scale::Stored stored[2][F::Scale::kStored] = {};
    float held[F::Scale::kStored] = {};
    scale.write(stored[0]), encoder.write(held);
    cuda::write_scale<F>(held, stored[1]);
    same &= std::memcmp(stored[0], stored[1], sizeof stored[0]) == 0;
    const float part[cuda::kEach] = {1.0f, -1.0f, 0.5f, 0.0f, -0.0f, 1e-7f, 0.3f, -0.004f};
    float x[cuda::kEach];
    for (int e = 0; e < cuda::kEach; ++e) {
      x[e] = bits_float(most) * part[e];
      if (is_nan_bits(float_bits(x[e])) && scale.coded) x[e] = 0.0f;
    }
    cuda::StatePack<F> pack;
    pack.clear();
    encoder.quantize(x, tables, pack);
    for (int e = 0; e < cuda::kEach; ++e)
      same &= pack.get(e) == (scale.coded ? F::quantize(scale.to_z(x[e])) : F::kZeroCode);
  }
  check(same, "scales and codes of blocks", F::kName);
}

/// Parameters against U::next and P::store.
template <class U, class P>
void test_parameters() {
  Numbers numbers;
  int64_t wrong = 0;
  for (int round = 0; round < 200'000; ++round) {
    const int64_t t = 1 + round % 1000;
    const double tiny = round % 11 == 0 ? 1e-15 : round % 13 == 0 ? 0.0 : 1e-8;
    const double hyper[] = {round % 17 == 0 ? 0.0 : 1e-3, 0.9, round % 2 ? 0.95 : 0.999, tiny, 0.1};
    cuda::AdamStep<U> step;
    step.set(U::prepare(hyper, t, 1.0));
    // Ordinary numbers, then mixed with zeros, subnormals, and values near every end.
    const bool strange = round % 3 == 0;
    cuda::Pack8<typename P::Storage> param;
    cuda::CompensationPack<P> compensation;
    param.clear(), compensation.clear();
    typename P::Compensation c[cuda::kEach] = {}, expected_c[cuda::kEach] = {};
    float p[cuda::kEach], m[cuda::kEach], v[cuda::kEach];
    Random8 random;
    for (uint32_t& word : random.word) word = numbers.next();
    typename P::Storage expected[cuda::kEach];
    for (int e = 0; e < cuda::kEach; ++e) {
      const uint32_t kind = strange ? numbers.next() % 16 : 0;
      p[e] = kind == 1   ? 0.0f
             : kind == 2 ? -0.0f
             : kind == 3 ? numbers.between(-126, 127)
             : kind == 4 ? bits_float(numbers.next())
                         : numbers.between(-14, 1);
      m[e] = kind == 5   ? 0.0f
             : kind == 6 ? -0.0f
             : kind == 7 ? numbers.between(-126, 127)
             : kind == 8 ? bits_float(numbers.next())
             : kind == 9 ? numbers.between(-80, -50)
                         : numbers.between(-30, 1);
      v[e] = kind == 10 || kind == 5 ? 0.0f
             : kind == 11            ? bits_float(numbers.next() >> 9)
             : kind == 12            ? bits_float(numbers.next())
             : kind == 13            ? numbers.between(-126, 127)
                                     : m[e] * m[e] * numbers.uniform() * 2.0f;
      if (kind == 14) p[e] = m[e] = v[e] = 0.0f;
      if (kind == 15) p[e] = bits_float(0x7f7f0000u | (numbers.next() & 0x8000ffffu));
      if constexpr (sizeof(typename P::Storage) == 2) {
        p[e] = bits_float(float_bits(p[e]) & 0xffff0000u);
        param.set(e, static_cast<typename P::Storage>(float_bits(p[e]) >> 16));
      }
      p[e] = p[e] * step.coef.decay;
      expected_c[e] = c[e];
      expected[e] = P::store(U::next(p[e], m[e], v[e], step.coef), random.bits16(e), expected_c[e]);
    }
    const cuda::Largest largest = cuda::largest_of(m, v);
    cuda::store_adam<U, P>(step, p, m, v, largest, random, param, compensation);
    for (int e = 0; e < cuda::kEach; ++e) {
      const auto got = param.get(e);
      bool same = std::memcmp(&got, &expected[e], sizeof got) == 0;
      if constexpr (cuda::kHasCompensation<P>) same &= compensation.get(e) == expected_c[e];
      if (!same && wrong++ < 3)
        std::printf("%s: p %a, m %a, v %a, eps %g\n", P::kName, p[e], m[e], v[e], tiny);
    }
  }
  check(wrong == 0, "parameters", P::kName);
}

/// The update of 8 values against the rule's own update and P::store.
template <class U, class P>
void test_rule(const std::vector<double>& hyper) {
  constexpr int kStates = U::kSlots > 0 ? U::kSlots : 1;
  Numbers numbers;
  int64_t wrong = 0;
  for (int round = 0; round < 100'000; ++round) {
    const int64_t t = 1 + round % 1000;
    std::vector<double> now = hyper;
    if (round % 17 == 0) now[0] = 0.0;
    if constexpr (__is_same(U, SgdMomentum)) now[3] = round % 2;
    typename U::Coef coef = U::prepare(now.data(), t, 1.0);
    if constexpr (requires { coef.minimum; }) {
      coef.step = static_cast<float>(now[0]), coef.decay = 0.999f;
      if (round % 5 == 0) coef.minimum = 0x1p-126f;
    }
    if constexpr (__is_same(U, Lamb)) coef.step = static_cast<float>(now[0]);
    if constexpr (__is_same(U, Lars)) coef.ratio = 0.01f;
    if constexpr (__is_same(U, Came)) coef.clip = 0.7f;
    cuda::FastStep<U> step;
    step.set(coef);
    const bool strange = round % 3 == 0;
    cuda::Pack8<typename P::Storage> param;
    cuda::CompensationPack<P> compensation;
    param.clear(), compensation.clear();
    float p[cuda::kEach], g[cuda::kEach], s[kStates][cuda::kEach];
    float expected_s[cuda::kEach][kStates] = {};
    constexpr int kFactors = factors_of<U>() > 0 ? factors_of<U>() : 1;
    cuda::Factors<U> factors{};
    for (cuda::Factors8& factor : factors) factor.row = std::fabs(numbers.between(-30, 1));
    typename P::Storage expected[cuda::kEach];
    Random8 random;
    for (uint32_t& word : random.word) word = numbers.next();
    for (int e = 0; e < cuda::kEach; ++e) {
      const auto any = [&](float usual) {
        const uint32_t kind = strange ? numbers.next() % 12 : 9;
        return kind == 0   ? 0.0f
               : kind == 1 ? -0.0f
               : kind == 2 ? numbers.between(-126, 127)
               : kind == 3 ? bits_float(numbers.next())
               : kind == 4 ? bits_float(numbers.next() >> 9)
                           : usual;
      };
      p[e] = any(numbers.between(-14, 1));
      if constexpr (sizeof(typename P::Storage) == 2) {
        p[e] = bits_float(float_bits(p[e]) & 0xffff0000u);
        param.set(e, static_cast<typename P::Storage>(float_bits(p[e]) >> 16));
      }
      g[e] = any(numbers.between(-30, 1));
      for (cuda::Factors8& factor : factors) factor.col[e] = std::fabs(any(numbers.uniform()));
      for (int k = 0; k < U::kSlots; ++k) {
        float x = any(numbers.between(-30, 1));
        if (!U::kSlot[k].is_signed && x < 0.0f) x = -x;
        s[k][e] = expected_s[e][k] = x;
      }
      float f[2 * kFactors];
      for (int k = 0; k < kFactors; ++k)
        f[2 * k] = factors[k].row, f[2 * k + 1] = factors[k].col[e];
      float next = p[e];
      update_element<U>(g[e], next, expected_s[e], f, coef);
      typename P::Compensation c{};
      expected[e] = P::store(next, random.bits16(e), c);
    }
    cuda::Mosts<U> most{};
    step.template update<P>(g, p, s, factors, most, random, param, compensation);
    bool same = true;
    for (int k = 0; k < U::kSlots; ++k) {
      uint32_t largest = 0;
      for (int e = 0; e < cuda::kEach; ++e) {
        same &= float_bits(canonical(s[k][e])) == float_bits(canonical(expected_s[e][k]));
        const uint32_t bits = U::kSlot[k].is_signed ? magnitude_bits(s[k][e]) : float_bits(s[k][e]);
        largest = bits > largest ? bits : largest;
      }
      same &= largest == most[k] || (is_nan_bits(largest) && is_nan_bits(most[k]));
    }
    for (int e = 0; e < cuda::kEach; ++e) {
      const auto got = param.get(e);
      same &= std::memcmp(&got, &expected[e], sizeof got) == 0;
    }
    if (!same && wrong++ < 3) std::printf("%s %s differs in round %d\n", U::kName, P::kName, round);
  }
  check(wrong == 0, "the update of 8 values", U::kName);
}
template <class U>
void test_rule(const std::vector<double>& hyper) {
  test_rule<U, BFloat16Stochastic>(hyper);
  test_rule<U, BFloat16Nearest>(hyper);
  test_rule<U, Float32Param>(hyper);
}

/// Split parameters: every share, then parameters of all kinds.
template <class P>
void test_split() {
  using Correction = typename P::Compensation;
  bool same = true;
  const int most = sizeof(Correction) == 1 ? 128 : 32768;
  for (int c = -most; c < most; ++c) {
    const float share = static_cast<float>(-c) / P::kMax;
    same &= float_bits(cuda::negative_share<P>(static_cast<Correction>(c))) == float_bits(share);
  }
  check(same, "shares", P::kName);
  Numbers numbers;
  same = true;
  for (int round = 0; round < 400'000; ++round) {
    cuda::Pack8<uint16_t> param, stored;
    cuda::CompensationPack<P> compensation, kept;
    param.clear(), compensation.clear(), stored.clear(), kept.clear();
    float p[cuda::kEach], next[cuda::kEach];
    for (int e = 0; e < cuda::kEach; ++e) {
      const uint32_t any = round % 4 == 0 ? numbers.next() : float_bits(numbers.between(-63, 65));
      param.set(e, static_cast<uint16_t>(any >> 16));
      compensation.set(e, static_cast<Correction>(numbers.next()));
      next[e] = round % 8 == 1 ? bits_float(numbers.next()) : numbers.between(-62, 64);
      if (round % 64 == 2) next[e] = bits_float(float_bits(next[e]) & 0xffff8000u);  // ties
    }
    cuda::load_split<P>(param, compensation, p);
    cuda::store_split<P>(next, stored, kept);
    for (int e = 0; e < cuda::kEach; ++e) {
      const float expected = P::load(param.get(e), compensation.get(e));
      same &= float_bits(canonical(p[e])) == float_bits(canonical(expected));
      Correction c{};
      same &= stored.get(e) == P::store(next[e], 0, c);
      same &= kept.get(e) == c;
    }
  }
  check(same, "loads and stores", P::kName);
}

void test_largest() {
  const float strange[] = {bits_float(0x7fffffffu), bits_float(0xff800000u), -3.0f, -0.0f};
  bool same = true;
  for (float x : strange) {
    for (int at = 0; at < cuda::kEach; ++at) {
      float m[cuda::kEach] = {1, -1, 0.5f, 0, -0.0f, 1, 1, 1}, v[cuda::kEach] = {};
      m[at] = x;
      uint32_t most = 0;
      for (float y : m) most = magnitude_bits(y) > most ? magnitude_bits(y) : most;
      same &= float_bits(cuda::largest_of(m, v).m) == most;
    }
  }
  check(same, "largest magnitudes", "Largest");
}

}  // namespace
}  // namespace lowbit

int main(int argc, char** argv) {
  using namespace lowbit;
  const bool all = argc > 1 && std::strcmp(argv[1], "all") == 0;
  test_codes<Dynamic8>(all);
  test_codes<Dynamic8Unsigned>(all);
  test_codes<Dynamic4>(all);
  test_codes<PowerOne4Unsigned>(all);
  test_codes<Float8E4M3>(all);
  test_codes<Float8E4M3Unsigned>(all);
  test_codes<Companded8>(all);
  test_codes<Companded8Unsigned>(all);
  test_codes<Log8>(all);
  test_codes<Log8Signed>(all);
  test_scales<Dynamic8>();
  test_scales<Dynamic8Unsigned>();
  test_scales<Dynamic4>();
  test_scales<PowerOne4Unsigned>();
  test_scales<Float8E4M3>();
  test_scales<Float8E4M3Unsigned>();
  test_scales<Companded8>();
  test_scales<Companded8Unsigned>();
  test_scales<Log8>();
  test_scales<Log8Signed>();
  test_parameters<AdamW, BFloat16Stochastic>();
  test_parameters<AdamW, BFloat16Nearest>();
  test_parameters<AdamW, BFloat16Kahan>();
  test_parameters<AdamW, BFloat16Split8>();
  test_parameters<AdamW, BFloat16Split16>();
  test_parameters<AdamW, Float32Param>();
  test_rule<AdamW>({1e-3, 0.9, 0.95, 1e-8, 0.1});
  test_rule<Adam>({1e-3, 0.9, 0.95, 1e-8, 0.1});
  test_rule<Lion>({1e-3, 0.9, 0.99, 0.1});
  test_rule<SgdMomentum>({1e-3, 0.9, 0.1, 1, 0.1, 0, 0});
  test_rule<SgdMomentum>({1e-3, 0.9, 0.1, 1, 0.1, 1, 1});
  test_rule<Ademamix>({1e-3, 0.9, 0.95, 0.9999, 5, 0, 0, 1e-8, 0.1});
  const double none = -1.0;
  test_rule<Adafactor>({1e-3, -0.8, none, none, 1e-30, 1e-3, 1, 0, 0, 0, 1, none, 0});
  test_rule<AdafactorMomentum>({1e-3, -0.8, none, 0.9, 1e-30, 1e-3, 1, 0, 0, 0, 1, none, 0});
  test_rule<AdafactorMomentum>({1e-3, -0.8, 0.99, 0.9, 1e-3, 1e-3, 1, 0, 0, 0, 1, none, 1});
  test_rule<AdamWFactored>({1e-3, 0.9, 0.95, 1e-8, 0.1});
  test_rule<Rmsprop>({1e-3, 0.99, 1e-8, 0.1, 0, 0});
  test_rule<Adagrad>({1e-2, 0.1, 0.1, 1e-10});
  test_rule<Lamb>({1e-3, 0.9, 0.999, 1e-6, 0.1});
  test_rule<Lars>({1e-1, 0.9, 0.1, 0, 1e-4, 1e-3, 1e-8});
  test_rule<Lars>({1e-1, 0.9, 0, 1, 1e-4, 1e-3, 1e-8});
  test_rule<Sgd>({1e-3, 0.9, 0.1, 1, 0.1, 0, 0});
  test_rule<MuonMomentum>({1, 0.95, 1});
  test_rule<MuonMomentum>({1, 0.3, 0});
  test_rule<Muon>({1e-2, 0.1, 0.2, 0});
  test_rule<Muon>({1e-2, 0.1, 0.2, 1});
  test_rule<Came>({1e-3, 0.9, 0.999, 0.9999, 1e-30, 1e-16, 1, 0.1});
  test_split<BFloat16Split8>();
  test_split<BFloat16Split16>();
  test_largest();
  return finish();
}
