// Every kernel of every instruction set of this processor gives the bits of the baseline, and the
// codes of the baseline are those of a brute-force search. Values are ordinary, adversarial and
// random, lengths run from 1 to a tile, addresses have any alignment, and no byte is written past
// the end.
#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "catalog/catalog.h"
#include "catalog/coefficients.h"
#include "check.h"
#include "core/pack.h"
#include "core/registry.h"
#include "core/scale/block.h"
#include "core/state/chance/stochastic.h"
#include "cpu/step.h"

namespace {

using namespace lowbit;
using lowbit::cpu::Draw;
using lowbit::cpu::Kernels;

std::mt19937 random_engine(20240229);
uint32_t draw32() { return static_cast<uint32_t>(random_engine()); }

/// A buffer at an address of any alignment, between bytes that must not change.
class Guarded {
 public:
  explicit Guarded(size_t bytes, size_t shift = 0)
      : bytes_(bytes), shift_(kGuard + shift), all_(bytes + shift + 2 * kGuard, 0xa5) {}
  uint8_t* bytes() { return all_.data() + shift_; }
  float* floats() { return reinterpret_cast<float*>(bytes()); }
  /// Whether the bytes outside [0, used) are untouched.
  bool whole(size_t used) const {
    for (size_t i = 0; i < all_.size(); ++i) {
      if ((i < shift_ || i >= shift_ + used) && all_[i] != 0xa5) return false;
    }
    return true;
  }
  bool same(const Guarded& other) const {
    return std::memcmp(all_.data() + shift_, other.all_.data() + other.shift_, bytes_) == 0;
  }

 private:
  static constexpr size_t kGuard = 256;
  size_t bytes_, shift_;
  std::vector<uint8_t> all_;
};

/// Finds scales and writes codes, optionally with stochastic rounding.
void quantize(const Kernels& kernel, int format, const float* x, void* codes, void* stored,
              int block, int n, const uint16_t* random16) {
  cpu::BlockScales scales;
  if (kernel.scale[format] != nullptr)
    kernel.scale[format](x, block, n, nullptr, nullptr, stored, scales);
  kernel.quantize[format](x, codes, scales, block, n, random16);
}

enum class Kind {
  kNormal,
  kSquares,
  kExponents,
  kNearBoundaries,
  kSubnormal,
  kZeros,
  kBits,
  kCount
};

/// n values. Those of kNearBoundaries, divided by the largest, which is 1, are the middles of
/// entries and their neighbors.
std::vector<float> values(Kind kind, int n) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) {
    const float sign = draw32() & 1 ? -1.0f : 1.0f;
    switch (kind) {
      case Kind::kNormal:
        v = normal(random_engine) * 1e-3f;
        break;
      case Kind::kSquares:
        v = normal(random_engine), v = v * v * 1e-6f;
        break;
      case Kind::kExponents:
        v = sign * bits_float(draw32() % 0x3f800000u);
        break;
      case Kind::kNearBoundaries: {
        const int m = static_cast<int>(draw32() % 127);
        const float* map = draw32() & 1 ? kDynamic8Tables.magnitude
                                        : kDynamic8UnsignedTables.magnitude + draw32() % 128;
        const float middle = static_cast<float>((static_cast<double>(map[m]) + map[m + 1]) / 2.0);
        v = sign * bits_float(float_bits(middle) + draw32() % 5 - 2);
        break;
      }
      case Kind::kSubnormal:
        v = sign * bits_float(draw32() % 0x00900000u);
        break;
      case Kind::kZeros:
        v = draw32() % 3 ? sign * 0.0f : normal(random_engine);
        break;
      default:
        v = bits_float(draw32());  // including infinities and NaN
    }
  }
  if (kind == Kind::kNearBoundaries) x[draw32() % x.size()] = draw32() & 1 ? 1.0f : -1.0f;
  return x;
}

void canonicalize(float* x, int n) {
  for (int i = 0; i < n; ++i) x[i] = canonical(x[i]);
}

/// The variations of one run of a kernel: length, alignment of floats (in bytes) and of codes.
struct Shape {
  int n;
  size_t shift, code_shift;
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (int n = 1; n <= kTile; ++n)
    all.push_back({n, 4 * static_cast<size_t>(n % 7), static_cast<size_t>(n % 5)});
  for (int i = 0; i < 8; ++i) all.push_back({kTile, 0, 0});
  return all;
}

std::string name_of(const Kernels& kernel, const char* what, int index, Shape s) {
  return std::string(kernel.isa) + " " + what + "[" + std::to_string(index) +
         "] n=" + std::to_string(s.n);
}

/// Codes, scales and values of one format on both: blocks of all lengths, nearest and stochastic
/// rounding, with the blocks' own scales and with one given scale per value.
void compare_quantize_dequantize(const Kernels& base, const Kernels& kernel) {
  constexpr size_t kRoom = kTile * 4, kScaleRoom = kTile / kMinBlock * 8;
  for (int f = 0; f < state_count(); ++f) {
    const StateInfo info = state_info(f);
    const size_t align = info.scaled ? static_cast<size_t>(ceil_div(info.bits, 8)) : 4;
    for (int kind = 0; kind < static_cast<int>(Kind::kCount); ++kind) {
      for (const Shape s : shapes()) {
        if ((s.n + f + kind) % 4 != 0 && s.n != kTile && s.n > 20) continue;
        const int block = info.scaled ? 32 << (draw32() % 4) : 0;
        auto x = values(static_cast<Kind>(kind), s.n);
        if (!info.is_signed && kind != static_cast<int>(Kind::kBits)) {
          for (float& v : x) v = v < 0.0f ? -v : v;
        }
        uint16_t chance[kTile];
        for (uint16_t& r : chance) r = static_cast<uint16_t>(draw32());
        const uint16_t* random16 = draw32() % 2 ? chance : nullptr;
        const size_t shift = align * s.code_shift;  // bytes may have any alignment
        const auto used = static_cast<size_t>(code_bytes(s.n, info.bits));
        Guarded in(kRoom, s.shift), codes_a(kRoom, shift), codes_b(kRoom, shift);
        Guarded scales_a(kScaleRoom), scales_b(kScaleRoom);
        std::memcpy(in.bytes(), x.data(), x.size() * 4);
        quantize(base, f, in.floats(), codes_a.bytes(), scales_a.bytes(), block, s.n, random16);
        quantize(kernel, f, in.floats(), codes_b.bytes(), scales_b.bytes(), block, s.n, random16);
        const std::string what = std::string(info.name) + " kind " + std::to_string(kind) +
                                 (random16 != nullptr ? " by chance" : "");
        check(codes_a.same(codes_b) && scales_a.same(scales_b),
              name_of(kernel, "quantize", f, s) + what);
        check(codes_b.whole(used) &&
                  scales_b.whole(info.scaled ? static_cast<size_t>(ceil_div(s.n, block)) *
                                                   static_cast<size_t>(info.scale_bytes)
                                             : 0),
              name_of(kernel, "quantize writes too far:", f, s) + what);

        Guarded out_a(kRoom, s.shift), out_b(kRoom, s.shift);
        const auto compare_values = [&](const char* how) {
          canonicalize(out_a.floats(), s.n), canonicalize(out_b.floats(), s.n);
          check(out_a.same(out_b) && out_b.whole(static_cast<size_t>(s.n) * 4),
                name_of(kernel, how, f, s) + what);
        };
        base.dequantize[f](codes_a.bytes(), scales_a.bytes(), block, out_a.floats(), s.n);
        kernel.dequantize[f](codes_a.bytes(), scales_a.bytes(), block, out_b.floats(), s.n);
        compare_values("dequantize");
        if (base.quantize_given[f] == nullptr) continue;
        uint32_t absmax[kTile];
        for (int i = 0; i < s.n; ++i)
          absmax[i] =
              magnitude_bits(x[static_cast<size_t>(i)]) + draw32() % (1u << (draw32() % 24));
        base.quantize_given[f](in.floats(), codes_a.bytes(), absmax, s.n, random16);
        kernel.quantize_given[f](in.floats(), codes_b.bytes(), absmax, s.n, random16);
        check(codes_a.same(codes_b) && codes_b.whole(used),
              name_of(kernel, "quantize_given", f, s) + what);
        base.dequantize_given[f](codes_a.bytes(), absmax, out_a.floats(), s.n);
        kernel.dequantize_given[f](codes_a.bytes(), absmax, out_b.floats(), s.n);
        compare_values("dequantize_given");
      }
    }
    if (!info.scaled || info.bits != 8) continue;
    uint8_t codes[256];
    for (int c = 0; c < 256; ++c) codes[c] = static_cast<uint8_t>(c);
    for (const float scale : {1.0f, 0.37f, 0x1p-126f, 3e38f, 0.0f}) {
      float a[256], b[256];
      const float stored[2] = {scale, -20.5f};  // a float16 scale is the lower half of the first
      base.dequantize[f](codes, stored, 256, a, 256);
      kernel.dequantize[f](codes, stored, 256, b, 256);
      canonicalize(a, 256), canonicalize(b, 256);
      check(std::memcmp(a, b, sizeof a) == 0,
            std::string(kernel.isa) + " dequantize of all codes of " + info.name);
    }
  }
}

void compare_loads_and_stores(const Kernels& base, const Kernels& kernel) {
  for (const Shape s : shapes()) {
    for (int f = 0; f < cpu::kMaxKernels && base.load_grad[f]; ++f) {
      Guarded in(kTile * 4, s.shift), a(kTile * 4, s.shift), b(kTile * 4, s.shift);
      for (int i = 0; i < kTile * 4; ++i) in.bytes()[i] = static_cast<uint8_t>(draw32());
      base.load_grad[f](in.bytes(), a.floats(), s.n),
          kernel.load_grad[f](in.bytes(), b.floats(), s.n);
      canonicalize(a.floats(), s.n), canonicalize(b.floats(), s.n);
      check(a.same(b) && b.whole(static_cast<size_t>(s.n) * 4), name_of(kernel, "load_grad", f, s));
    }
    for (int f = 0; f < cpu::kMaxKernels && base.store_param[f]; ++f) {
      for (int kind = 0; kind < static_cast<int>(Kind::kCount); ++kind) {
        auto x = values(static_cast<Kind>(kind), s.n);
        if (kind == 0) {  // around the largest finite values, half the time without infinities
          const uint32_t range = draw32() & 1 ? 0x20000u : 0x30000u;
          for (float& v : x)
            v = bits_float((draw32() & 0x80000000u) | (0x7f7e0000u + draw32() % range));
        }
        uint16_t random16[kTile];
        for (uint16_t& r : random16) r = static_cast<uint16_t>(draw32() % 4 ? draw32() : 0xffffu);
        Guarded a(kTile * 4, s.shift), b(kTile * 4, s.shift), back_a(kTile * 4), back_b(kTile * 4);
        Guarded extra_a(kTile * 4), extra_b(kTile * 4);
        const ParamInfo info = param_info(f);
        const auto n = static_cast<size_t>(s.n);
        base.store_param[f](x.data(), a.bytes(), extra_a.bytes(), s.n, random16),
            kernel.store_param[f](x.data(), b.bytes(), extra_b.bytes(), s.n, random16);
        check(a.same(b) && b.whole(n * static_cast<size_t>(info.bytes)) && extra_a.same(extra_b) &&
                  extra_b.whole(n * static_cast<size_t>(info.compensation_bytes)),
              name_of(kernel, "store_param", f, s));
        base.load_param[f](a.bytes(), extra_a.bytes(), back_a.floats(), s.n),
            kernel.load_param[f](a.bytes(), extra_a.bytes(), back_b.floats(), s.n);
        canonicalize(back_a.floats(), s.n), canonicalize(back_b.floats(), s.n);
        check(back_a.same(back_b) && back_b.whole(static_cast<size_t>(s.n) * 4),
              name_of(kernel, "load_param", f, s));
      }
    }
  }
}

/// Whether scales from the magnitudes that an update found equal those measured from the state.
bool finds_absmax(const Kernels& kernel, float* const* states, int slots, int n,
                  const std::vector<float>& absmax) {
  constexpr int kFormat = 2;  // dynamic8
  bool same = true;
  for (int k = 0; k < slots; ++k) {
    for (const int block : {32, 64, 256}) {
      cpu::BlockScales scales;
      float stored[2][cpu::kMaxBlocks] = {};
      kernel.scale[kFormat](states[k], block, n, nullptr, nullptr, stored[0], scales);
      kernel.scale[kFormat](states[k], block, n, nullptr,
                            &absmax[static_cast<size_t>(k) * cpu::kMaxOfSlot], stored[1], scales);
      same = same && std::memcmp(stored[0], stored[1], sizeof stored[0]) == 0;
    }
  }
  return same;
}

/// Every rule's update and measuring rounds, with coefficients prepared as for a step.
void compare_updates(const Kernels& base, const Kernels& kernel) {
  const double hyper[16] = {1e-3, 0.9, 0.99, 0.95, 1e-8, 1e-3, 1.0, 1e-2, 0, 0, 0, -1.0, 0};
  for (int f = 0; f < rule_count(); ++f) {
    const RuleInfo info = rule_info(f);
    Job job{};
    job.rule = f;
    job.numel = 1000;
    prepare(job, hyper, 5, 0.5);
    for (const Shape s : shapes()) {
      const Kind kind = static_cast<Kind>(draw32() % static_cast<uint32_t>(Kind::kCount));
      const auto g = values(kind, s.n), p = values(Kind::kNormal, s.n);
      std::vector<float> state[2][kMaxSlots], param[2] = {p, p}, factor[2 * kMaxFactors];
      const float* factors[2 * kMaxFactors];
      for (int k = 0; k < kMaxSlots; ++k)
        state[0][k] = state[1][k] = values(k ? Kind::kSquares : Kind::kNormal, s.n);
      for (int k = 0; k < 2 * kMaxFactors; ++k) {
        factor[k] = values(Kind::kSquares, s.n);
        factors[k] = factor[k].data();
      }
      bool same = true;
      for (int round = 0; round < info.rounds; ++round) {
        std::vector<float> grid[2], totals[2][kMaxTotals];
        for (int which = 0; which < 2; ++which) {
          grid[which].resize(static_cast<size_t>(s.n));
          float* out[kMaxTotals];
          for (int k = 0; k < kMaxTotals; ++k) {
            totals[which][k].resize(static_cast<size_t>(s.n));
            out[k] = totals[which][k].data();
          }
          const float* states[kMaxSlots];
          for (int k = 0; k < kMaxSlots; ++k) states[k] = state[which][k].data();
          (which ? kernel : base)
              .measure[f](round, g.data(), p.data(), states, factors, s.n, job.coef,
                          grid[which].data(), out);
          canonicalize(grid[which].data(), s.n);
          for (float* x : out) canonicalize(x, s.n);
        }
        same = same && std::memcmp(grid[0].data(), grid[1].data(), grid[0].size() * 4) == 0;
        for (int k = 0; k < kMaxTotals; ++k)
          same = same && std::memcmp(totals[0][k].data(), totals[1][k].data(),
                                     totals[0][k].size() * 4) == 0;
      }
      std::vector<float> absmax(kMaxSlots * cpu::kMaxOfSlot);
      for (int which = 0; which < 2; ++which) {
        float* states[kMaxSlots];
        for (int k = 0; k < kMaxSlots; ++k) states[k] = state[which][k].data();
        (which ? kernel : base)
            .update[f](g.data(), param[which].data(), states, factors, s.n, job.coef, nullptr,
                       absmax.data());
        same = same && (info.factors > 0 || finds_absmax(kernel, states, info.slots, s.n, absmax));
        canonicalize(param[which].data(), s.n);
        for (float* x : states) canonicalize(x, s.n);
      }
      same = same && std::memcmp(param[0].data(), param[1].data(), p.size() * 4) == 0;
      for (int k = 0; k < kMaxSlots; ++k)
        same = same && std::memcmp(state[0][k].data(), state[1][k].data(), p.size() * 4) == 0;
      check(same, name_of(kernel, "update", f, s) + " " + info.name);
    }
  }
}

/// The bits that an update draws are those of core/random.h, also if the low word of the group
/// wraps around inside the tile.
void check_draws(const Kernels& kernel) {
  const double hyper[5] = {1e-3, 0.9, 0.999, 1e-8, 1e-2};
  const auto coef = AdamW::prepare(hyper, 1, 1.0);
  for (const uint64_t first :
       {0ull, 12345ull, 0xffffffffull, 0xfffffff1ull, 0x1ffffffe8ull, 0x7fffffffffffull}) {
    for (int n = 1; n <= kTile; ++n) {
      const RandomKey key{draw32(), draw32(), draw32() % 1000, draw32()};
      const int groups = (n + 7) / 8 + static_cast<int>(draw32() % 2);
      std::vector<float> zero(4 * kTile);
      float* const states[2] = {&zero[2 * kTile], &zero[3 * kTile]};
      Guarded out(static_cast<size_t>(groups + 7) * 16, 2 * static_cast<size_t>(n % 3));
      const Draw draw{key, first, groups, reinterpret_cast<uint16_t*>(out.bytes())};
      kernel.update[0](&zero[0], &zero[kTile], states, nullptr, n, &coef, &draw, nullptr);
      bool good = out.whole(static_cast<size_t>(groups + 7) * 16);
      for (int i = 0; i < groups * 8; ++i) {
        good =
            good && draw.out[i] == random8(key, first + static_cast<uint64_t>(i / 8)).bits16(i % 8);
      }
      check(good, std::string(kernel.isa) + " draw n=" + std::to_string(n) +
                      " first=" + std::to_string(first));
    }
  }
}

/// The nearest code by trying all. A tie goes to the larger value, and a positive unsigned value is
/// never zero.
template <class F>
uint32_t brute_force(float z) {
  uint32_t best = 0;
  for (uint32_t c = 1; c < 256; ++c) {
    const double old_distance = static_cast<double>(z) - F::dequantize(best),
                 distance = static_cast<double>(z) - F::dequantize(c);
    if (distance * distance <= old_distance * old_distance) best = c;
  }
  return !F::kSigned && best == 0 && z > 0.0f ? 1 : best;
}

template <class F>
void check_codes(const Kernels& kernel, int format) {
  for (int round = 0; round < 60; ++round) {
    auto x = values(round % 2 ? Kind::kNearBoundaries : Kind::kExponents, kTile);
    if (!F::kSigned) {
      for (float& v : x) v = v < 0.0f ? -v : v;
    }
    x[0] = 1.0f;  // so that the scale is 1
    uint8_t codes[kTile];
    float scale = 0.0f;
    quantize_run(kernel, format, x.data(), codes, &scale, kTile, kTile);
    int wrong = 0;
    for (int i = 0; i < kTile; ++i) wrong += codes[i] != brute_force<F>(x[static_cast<size_t>(i)]);
    const std::string what = std::string(kernel.isa) + " " + F::kName;
    check(scale == 1.0f && wrong == 0,
          what + " against brute force: " + std::to_string(wrong) + " wrong");
  }
}

/// Around the middle of every two neighboring entries: every float next to it, then fewer and fewer
/// as far as the arithmetic may be uncertain.
template <class F>
void check_boundaries(const Kernels& kernel, int format) {
  std::vector<float> x;
  for (uint32_t c = 0; c < 255; ++c) {
    const double middle = (static_cast<double>(F::dequantize(c)) + F::dequantize(c + 1)) / 2;
    const uint32_t at = float_bits(static_cast<float>(middle));
    for (uint32_t off = 0; off < 1 << 14; off += 1 + off / 64) {
      x.push_back(bits_float(at + off));
      x.push_back(bits_float(at - off));
    }
  }
  int wrong = 0;
  for (size_t i = 0; i < x.size(); i += kTile - 1) {
    float part[kTile] = {1.0f};  // so that the scale is 1
    const size_t n = std::min<size_t>(kTile - 1, x.size() - i);
    std::memcpy(part + 1, &x[i], n * sizeof(float));
    uint8_t codes[kTile];
    float scale;
    quantize_run(kernel, format, part, codes, &scale, kTile, kTile);
    for (size_t j = 0; j < n; ++j) wrong += codes[j + 1] != brute_force<F>(x[i + j]);
  }
  check(wrong == 0, std::string(kernel.isa) + " " + F::kName + " at boundaries: " +
                        std::to_string(wrong) + " of " + std::to_string(x.size()) + " wrong");
}

/// Entries and their neighbors up to four floats away, and chances that decide last: there the
/// vectors leave the decision to the definition.
template <class F>
void near_entries(std::vector<float>& x, uint16_t* chance) {
  for (size_t i = 0; i < x.size(); ++i) {
    const float entry = F::dequantize(draw32() % (1u << F::kBits));
    const uint32_t bits = float_bits(entry), away = draw32() % 9;
    const bool moves = magnitude_bits(entry) > 4 && magnitude_bits(entry) < float_bits(1.0f) - 4;
    x[i] = bits_float(moves ? bits + away - 4 : bits);
    if (draw32() % 3 == 0)
      chance[i] = static_cast<uint16_t>(draw32() % 4 - 2);  // 0, 1, or the last
  }
  x[0] = 1.0f;  // so that the scale is 1
}

/// Stochastic codes of many values are those of the definition for one value.
template <class F>
void check_chance(const Kernels& kernel, int format) {
  if constexpr (F::kScaled) {
    int wrong = 0;
    for (int turn = 0; turn < 40; ++turn) {
      auto x = values(static_cast<Kind>(turn % static_cast<int>(Kind::kBits)), kTile);
      for (float& v : x) v = v < 0.0f && !F::kSigned ? -v : v;
      uint16_t chance[kTile];
      std::generate(chance, chance + kTile, draw32);
      if constexpr (__is_same(typename F::Scale, BlockScale)) {
        if (turn % 2) near_entries<F>(x, chance);
      }
      std::vector<uint8_t> codes(kTile * 2);
      cpu::BlockScales scales;
      alignas(8) uint8_t stored[8];
      const int n = turn % 3 ? kTile : kTile - turn;
      kernel.scale[format](x.data(), kTile, n, nullptr, nullptr, stored, scales);
      kernel.quantize[format](x.data(), codes.data(), scales, kTile, n, chance);
      typename F::Scale scale;
      std::memcpy(&scale, &scales.of[0], sizeof scale);
      typename F::Storage one[kTile];
      std::memcpy(one, codes.data(), sizeof one);
      if constexpr (F::kBits < 8) unpack<F::kBits>(codes.data(), one, n);
      for (int i = 0; scale.coded && i < n; ++i) {
        const float v = x[static_cast<size_t>(i)];
        wrong += one[i] != quantize_stochastic<F>(scale, v, chance[i]);
      }
    }
    check(wrong == 0, std::string(kernel.isa) + " " + F::kName +
                          " by chance: " + std::to_string(wrong) + " wrong");
  }
}
template <class... F>
void check_chances(const Kernels& kernel, Types<F...>) {
  int i = 0;
  (check_chance<F>(kernel, i++), ...);
}

/// Floats of [2^-40, 1], a prime number apart, with both signs: every decade, every segment of the
/// tables.
void sweep(const Kernels& base, const Kernels& kernel) {
  for (int format = 2; format < 4; ++format) {
    bool same = true;
    for (uint32_t b = 0x2b800000u; b < 0x3f800000u; b += 255 * 499) {
      float x[kTile];
      for (uint32_t i = 0; i < kTile; ++i) {
        const uint32_t at = b + 499 * i;
        x[i] = bits_float(at < 0x3f800000u ? at : 0x3f800000u) *
               (format == 2 && (i & 1) ? -1.0f : 1.0f);
      }
      x[0] = 1.0f;
      uint8_t codes_a[kTile], codes_b[kTile];
      float scale_a, scale_b;
      quantize_run(base, format, x, codes_a, &scale_a, kTile, kTile);
      quantize_run(kernel, format, x, codes_b, &scale_b, kTile, kTile);
      same = same && std::memcmp(codes_a, codes_b, kTile) == 0;
    }
    check(same, std::string(kernel.isa) + " quantize sweep, format " + std::to_string(format));
  }
}

}  // namespace

/// With the argument "draws", checks the random bits only: the rest takes too long on an emulated
/// processor.
int main(int count, char** arguments) {
  const bool draws_alone = count > 1 && std::string(arguments[1]) == "draws";
  std::string names = cpu::usable_isas();
  cpu::set_isa("baseline");
  const Kernels& base = cpu::kernels();
  for (size_t at = 0; at < names.size();) {
    const size_t end = names.find(' ', at);
    const std::string name = names.substr(at, end - at);
    check(cpu::set_isa(name.c_str()), std::string("set_isa ").append(name));
    const Kernels& kernel = cpu::kernels();
    check(name == kernel.isa, std::string("the kernels of ").append(name));
    check_draws(kernel);
    if (!draws_alone) {
      compare_quantize_dequantize(base, kernel);
      compare_loads_and_stores(base, kernel);
      compare_updates(base, kernel);
      check_codes<Dynamic8>(kernel, 2);
      check_codes<Dynamic8Unsigned>(kernel, 3);
      check_boundaries<Dynamic8>(kernel, 2);
      check_boundaries<Dynamic8Unsigned>(kernel, 3);
      check_chances(kernel, StateFormats{});
      sweep(base, kernel);
    }
    at = end == std::string::npos ? names.size() : end + 1;
  }
  return finish();
}
