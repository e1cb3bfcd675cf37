// The cost of each kernel of an AdamW step on this processor, for every instruction set it runs:
// one thread, and the minimum over many repetitions on a tile that stays in the first-level cache.
//
//   cmake --build build/lowbit --target bench_kernels && build/lowbit/tests/cpp/bench_kernels
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "catalog/catalog.h"
#include "core/registry.h"
#include "cpu/step.h"

namespace {

using namespace lowbit;
using namespace lowbit::cpu;
constexpr int kN = kLongTile;

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Nanoseconds per value of the tile.
template <class F>
double fastest(const F& run) {
  constexpr int kTurns = 300, kRuns = 100;
  double best = 1e9;
  for (int turn = 0; turn < kTurns; ++turn) {
    const double begin = seconds();
    for (int i = 0; i < kRuns; ++i) run();
    best = std::min(best, seconds() - begin);
  }
  return best / kRuns / kN * 1e9;
}

/// One slot of state: a format, its block length, and values distributed like a first or a second
/// moment.
struct Moment {
  int format, block;
  alignas(64) float x[kN], dequantized[kN];
  alignas(64) char codes[kN], stored[kMaxBlocks * 32];
  BlockScales scales;

  Moment(const char* name, int block_length, bool square)
      : format(find_state(name)), block(block_length) {
    std::mt19937 engine(1);
    std::normal_distribution<float> normal(0.0f, 1e-3f);
    for (float& v : x) v = square ? normal(engine) * normal(engine) : normal(engine);
    for (float& v : x) v = square ? std::fabs(v) : v;
  }
};

/// The arrays of a tile, laid out as in cpu/tile.h.
struct Values {
  static constexpr int kRoom = kMaxTile + 272;
  alignas(64) float g[kRoom], p[kRoom], m[kRoom], v[kRoom];
  alignas(64) uint16_t grad[kN], param[kN], random[kN + 64];
  alignas(64) float absmax[kMaxSlots * kMaxOfSlot];
};

void measure(const Kernels& kernel, const char* first, const char* second, int block) {
  static Values t;
  static Moment m(first, block, false), v(second, block, true);
  m = Moment(first, block, false), v = Moment(second, block, true);
  const int param = find_param("bfloat16_stochastic"), rule = find_rule("adamw"), bf16 = 1;
  const double hyper[] = {1e-3, 0.9, 0.999, 1e-8, 1e-2};
  const auto coef = AdamW::prepare(hyper, 10, 1.0);
  const Draw draw{{1, 2, 3, 4}, 77, kN / 8, t.random};
  std::mt19937 engine(2);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  for (int i = 0; i < kN; ++i) {
    const float g = normal(engine) / 16, p = normal(engine);
    t.grad[i] = bfloat16_nearest(g), t.param[i] = bfloat16_nearest(p);
  }
  float* const states[] = {t.m, t.v, t.m, t.m};
  const auto scale = [&](Moment& s, const float* x, const float* absmax) {
    kernel.scale[s.format](x, s.block, kN, nullptr, absmax, s.stored, s.scales);
  };
  const auto quantize = [&](Moment& s, const float* x) {
    kernel.quantize[s.format](x, s.codes, s.scales, s.block, kN, nullptr);
  };
  const auto dequantize = [&](Moment& s, float* x) {
    kernel.dequantize[s.format](s.codes, s.stored, s.block, x, kN);
  };
  const auto load = [&] {
    kernel.load_grad[bf16](t.grad, t.g, kN), kernel.load_param[param](t.param, nullptr, t.p, kN);
  };
  const auto update = [&] {
    kernel.update[rule](t.g, t.p, states, nullptr, kN, &coef, &draw, t.absmax);
  };
  const auto store = [&] { kernel.store_param[param](t.p, t.param, nullptr, kN, t.random); };
  const auto row = [&](const char* what, double ns) { std::printf("  %-46s %.3f\n", what, ns); };
  for (Moment* s : {&m, &v}) scale(*s, s->x, nullptr), quantize(*s, s->x);
  std::printf("%s: %s and %s, blocks of %d, ns per value\n", kernel.isa, first, second, block);
  row("load gradient and parameter", fastest(load));
  row("dequantize the first moment", fastest([&] { dequantize(m, t.m); }));
  row("dequantize the second moment", fastest([&] { dequantize(v, t.v); }));
  row("update, draw random bits, find magnitudes", fastest([&] {
        std::memcpy(t.m, m.x, sizeof m.x), std::memcpy(t.v, v.x, sizeof v.x);
        update();
      }));
  row("find the scales of both",
      fastest([&] { scale(m, t.m, t.absmax), scale(v, t.v, t.absmax + kMaxOfSlot); }));
  row("quantize the first moment", fastest([&] { quantize(m, t.m); }));
  row("quantize the second moment", fastest([&] { quantize(v, t.v); }));
  row("store the parameter", fastest(store));
  row("the whole tile", fastest([&] {
        load(), dequantize(m, t.m), dequantize(v, t.v), update();
        scale(m, t.m, t.absmax), scale(v, t.v, t.absmax + kMaxOfSlot);
        quantize(m, t.m), quantize(v, t.v), store();
      }));
}

}  // namespace

int main() {
  const std::string names = usable_isas();
  for (size_t at = 0; at < names.size();) {
    const size_t end = std::min(names.find(' ', at), names.size());
    set_isa(names.substr(at, end - at).c_str());
    measure(kernels(), "dynamic8", "dynamic8_unsigned", 256);
    measure(kernels(), "dynamic4", "power1_4_unsigned", 128);
    at = end + 1;
  }
}
