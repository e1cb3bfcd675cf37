// Whether the emulator detects mistakes in the CUDA sources. This program contains copies of them
// with many planted mistakes (cuda_mutations.cmake). It applies one at a time and looks for a
// difference from the CPU walk, with the lanes in order and in reverse order. Each runs in a
// process of its own, which may crash, hang, or wait for a barrier that no other thread reaches.
#include "cuda_emulator.h"

static int mutation = 0;
#include "cuda/graph.cu"
#include "cuda/step/step.cu"
#include "cuda_compare.h"
#include "mutations.h"

namespace lowbit {
namespace {

Keep keep(const char* name, int block = 256, int kind = kBlock, bool stochastic = false) {
  return {find_state(name), block, kind, stochastic};
}

/// Whole and uneven rows, long and short blocks, by the fixed kernels and the general one.
bool steps_differ() {
  Options odd;
  odd.odd_grads = true;
  std::vector<Spec> specs = shapes(2, 1, find_state("dynamic8"), find_state("dynamic8_unsigned"));
  specs.erase(specs.begin(), specs.begin() + 4);
  specs[0].cols = 77, specs[0].first = int64_t{1} << 36;  // indices beyond 32 bits
  const auto large = [](const Spec& s) { return s.rows * s.cols > 2700; };
  specs.erase(std::remove_if(specs.begin(), specs.end(), large), specs.end());
  std::vector<Spec> coarse;
  for (int turn = 0; turn < 4; ++turn) {
    Spec spec = shaped({}, turn);
    spec.param = find_param(turn % 2 == 0 ? "bfloat16_split8" : "bfloat16_stochastic");
    spec.state[0] = keep("dynamic4", 0, kRank1, true);
    spec.state[1] = keep("linear4_unsigned", 128, kBlock, turn % 2 == 0);
    coarse.push_back(spec);
    spec.state[0] = keep("dynamic3", 0, kRow),
    spec.state[1] = keep("dynamic8_unsigned", 0, kColumn);
    coarse.push_back(spec);
    spec.state[0] = keep("dynamic8", 2048), spec.state[1] = keep("log8", 512);
    spec.inside = {}, spec.rows = turn == 0 ? 9 : 1, spec.cols = 2500 + 100 * turn;
    coarse.push_back(spec);
    spec.state[0] = keep("dynamic4", 128), spec.state[1] = keep("power1_4_unsigned", 128);
    spec.param = 2, spec.rows = 2, spec.cols = 264;
    coarse.push_back(spec);
  }
  Spec flat;  // whole tiles, one after another
  flat.rows = 3, flat.cols = 512, flat.state[1] = keep("dynamic8_unsigned", 64);
  coarse.push_back(flat);
  Spec plain;  // random bits without a barrier between one use and the next, many tiles in sequence
  plain.rows = 12, plain.cols = 301;
  plain.state[0] = keep("dynamic8", 64, kBlock, true),
  plain.state[1] = keep("bfloat16", 0, kNoScale, true);
  coarse.push_back(plain);
  return compare(specs, {}, 2, false) + compare(coarse, {}, 2, false) +
             compare(coarse, odd, 1, false) >
         0;
}

/// Sums of rows, columns and tensors.
bool sums_differ() {
  Options odd;
  odd.odd_grads = true;
  int wrong = 0;
  for (const char* rule : {"adafactor_momentum", "adamw_factored"}) {
    std::vector<Spec> specs;
    for (int turn = 0; turn < 4; ++turn) {
      Spec spec = shaped({}, turn);
      spec.rule = find_rule(rule);
      specs.push_back(spec);
    }
    specs[0].rows = 70;
    specs.push_back(cut(specs[0], 0)), specs.push_back(cut(specs[0], 5));
    specs.push_back(specs[0]);
    specs.back().rows = 1100, specs.back().cols = 40;
    specs.push_back(specs[1]);
    Spec strips = specs[0];  // several strips, by the kernel of any formats
    strips.cols = 42;
    specs.insert(specs.begin(), strips);
    strips.rows = 40, strips.cols = 40, strips.inside = {1, 40};  // each row is a matrix
    specs.insert(specs.begin(), strips);
    strips = cut(strips, 0);  // and here several, of which another rank counts the first
    strips.cols = 60, strips.inside = {3, 4, 5}, strips.first = 120, strips.back = 11;
    specs.insert(specs.begin(), strips);
    wrong += compare(specs, {}, 3, false);
    specs.erase(specs.end() - 2);
    wrong += compare(specs, odd, 2, false);
  }
  return wrong > 0;
}

/// Cut rows and blocks.
bool cuts_differ() {
  std::vector<Spec> specs, full_precision;
  for (int turn = 0; turn < 18; ++turn) {
    Spec spec;
    spec.state[0] = turn < 9 ? keep("dynamic4", 128) : keep("dynamic8", 512);
    spec.state[1] = turn < 9 ? keep("log8", 64) : keep("dynamic8_unsigned", 256);
    specs.push_back(cut(spec, turn));
    spec.state[0] = spec.state[1] = keep("float32", 0, kNoScale);
    full_precision.push_back(cut(spec, turn % 5));
    full_precision.back().cut = kNoCut;
  }
  Spec plain = cut({}, 6);  // one slot: nothing between the extremes of one tile and the next
  plain.rule = find_rule("lion"), plain.rows = 30, plain.param = find_param("bfloat16");
  plain.state[0] = keep("dynamic8", 64);
  for (const int64_t front : {64, 0}) {  // whole rows by a fixed kernel
    Spec spec = cut({}, 2);
    spec.front = front;
    specs.push_back(spec);
  }
  return compare(specs, {}, 3, false) + compare(full_precision, {}, 2, false) +
             compare({plain}, {}, 2, false) >
         0;
}

/// Tables that need more than one launch.
bool tables_differ() {
  std::vector<Spec> measured, factored, steps, mixed;
  for (int i = 0; i < 300; ++i) {
    Spec spec;
    spec.rows = i % 11 == 0 ? 0 : 1 + i % 2, spec.cols = 20 + 4 * (i % 5);
    spec.state[0] = keep("dynamic8", 0, kRank1),
    spec.state[1] = keep("linear4_unsigned", 0, kRank1);
    if (i < 90) measured.push_back(spec);
    spec.rule = find_rule("adafactor");
    if (i < 150) factored.push_back(spec);
    spec = {};
    spec.param = i % 3, spec.grad = i % 2, spec.rows = i % 7 == 0 ? 0 : 1;
    spec.cols = 8 + 24 * (i % 13) + i % 5 / 4;
    mixed.push_back(spec);
  }
  for (int i = 0; i < 1050; ++i) {  // steps of jobs in several parts
    Spec spec;
    spec.state[0] = spec.state[1] = keep("float32", 0, kNoScale);
    spec.rows = 3, spec.cols = 16, spec.front = 8;
    steps.push_back(spec);
  }
  Options once;  // tables that do not stay
  once.repeats = false;
  return compare(mixed, once, 2, false) + compare(measured, {}, 2, false) +
             compare(factored, {}, 2, false) + compare(steps, {}, 2, false) >
         0;
}

/// Values in the middle between two codes, by the quantizing kernel and by steps that store the
/// gradient.
bool ties_differ() {
  const cpu::Kernels& kernels = cpu::kernels();
  for (const char* name : {"dynamic8", "dynamic8_unsigned", "dynamic4", "power1_4_unsigned"}) {
    const int format = find_state(name);
    const StateInfo info = state_info(format);
    std::vector<float> value(static_cast<size_t>(1 << info.bits)), x{1.0f};
    std::vector<uint8_t> every(value.size()), codes[2], scales[2];
    for (size_t i = 0; i < every.size(); ++i) {
      every[i] = static_cast<uint8_t>(info.bits == 8 ? i : (2 * i + 1) << 4 | (2 * i));
      if (info.bits == 4 && i >= 8) every[i] = 0;
    }
    const float one = 1.0f;
    kernels.dequantize[format](every.data(), &one, 256, value.data(),
                               static_cast<int>(value.size()));
    for (size_t i = 0; i + 1 < value.size(); ++i) {
      const float middle = static_cast<float>((static_cast<double>(value[i]) + value[i + 1]) / 2.0);
      for (const float v : {middle, std::nextafter(middle, -2.0f), std::nextafter(middle, 2.0f)}) {
        x.push_back(v);
        if (x.size() % 256 == 0) x.push_back(1.0f);
      }
    }
    if (x.size() % 2 == 0) x.push_back(0.5f);  // a last byte with room for another code
    for (int on : {0, 1}) codes[on].resize(x.size()), scales[on].resize(x.size());
    const int n = static_cast<int>(x.size());
    CudaCode call{0, nullptr, format, 256, 1, n, x.data(), codes[1].data(), scales[1].data()};
    if (lowbit_cuda_quantize(&call) != nullptr) return true;
    for (int at = 0; at < n; at += kTile)
      cpu::quantize_run(kernels, format, &x[static_cast<size_t>(at)],
                        &codes[0][static_cast<size_t>(at * info.bits / 8)],
                        &scales[0][static_cast<size_t>(at / kTile * info.scale_bytes)], 256,
                        std::min(kTile, n - at));
    if (codes[0] != codes[1] || scales[0] != scales[1]) return true;
  }
  // A first moment of half the gradient, by a fixed kernel.
  Spec spec;
  spec.param = find_param("float32"), spec.grad = 0, spec.rows = 4, spec.cols = 128;
  spec.state[0] = keep("dynamic4", 128), spec.state[1] = keep("power1_4_unsigned", 128);
  const cuda::Shape& shape = cuda::kShapes.at[find_state("dynamic4")];
  Options half;
  half.beta1 = 0.5;
  for (int i = 1; i < shape.codes; ++i)
    half.given.push_back(2.0f * cuda::kBooks.boundary[shape.offset + i]);
  half.given.push_back(2.0f);
  return compare({spec}, half, 1, false) > 0;
}

bool codes_differ() {
  return wrong_codes<Dynamic8>() + wrong_codes<Dynamic8Unsigned>() + wrong_sums() +
             many_sums(300).wrong + wrong_means() >
         0;
}

/// Tables that stay, with more gradients than one launch brings, and units of several tiles.
bool repeats_differ() {
  Spec tiny;
  tiny.rows = 1, tiny.cols = 8;
  std::vector<Spec> specs(cuda::Prepare::kGrads + 20, tiny), large(5);
  large[0].rows = 301, large[0].cols = 776;
  large[0].state[0] = keep("dynamic8", 128);  // an odd number of blocks in a row
  large[1].rows = 1205, large[1].cols = 77;
  large[2].rows = 3, large[2].cols = 512;
  large[3] = cut({}, 2);
  large[3].state[0] = large[3].state[1] = keep("float32", 0, kNoScale);
  large[3].cut = kNoCut;
  large[4].rows = 603, large[4].cols = 512;
  large[4].state[1] = keep("dynamic8_unsigned", 32);  // those of four tiles are held
  return compare(large, {}, 2, false) + compare(specs, {}, 2, false) > 0;
}

/// The rules beside AdamW that have fixed kernels.
bool rules_differ() {
  Options odd;
  odd.odd_grads = true;
  int wrong = 0;
  for (const char* rule : {"lion", "sgd_momentum", "ademamix", "adafactor", "adafactor_momentum",
                           "rmsprop", "adagrad", "adamw", "lamb", "lars", "came"}) {
    std::vector<Spec> specs;
    for (int turn = 0; turn < 5; ++turn) {
      Spec spec;
      spec.rule = find_rule(rule);
      const bool slow = spec.rule == find_rule("ademamix");
      spec.state[0] = keep("dynamic8"),
      spec.state[1] = slow ? keep("bfloat16", 0, kNoScale, true) : keep("dynamic8_unsigned");
      if (spec.rule == find_rule("rmsprop") || spec.rule == find_rule("adagrad"))
        spec.state[0] = spec.state[1];
      if (spec.rule == find_rule("adamw") && turn % 2 == 0)
        spec.state[0] = keep("companded8", 32), spec.state[1] = keep("companded8_unsigned", 32);
      if (spec.rule == find_rule("adamw") && turn % 2 == 1)
        spec.state[0] = keep("log8_signed", 64), spec.state[1] = keep("log8");
      spec.rows = 3, spec.cols = turn == 0 ? 512 : 336;
      if (turn == 2) spec.inside = {6, 56};
      if (turn == 3) spec.inside = {3, 2, 56};
      if (turn == 4) spec.param = find_param("float32"), spec.grad = 0;
      specs.push_back(spec);
      if (turn != 1) continue;
      Keep& last = spec.state[slow];  // for step_any: rounded in the other way
      last.stochastic = !last.stochastic;
      specs.push_back(spec);
    }
    if (rule_info(specs[0].rule).factors > 0) {  // a flat shard, whole
      specs.push_back(cut(specs[0], 2));
      specs.back().cut = kNoCut;
      specs.back().state[0] = keep("float32", 0, kNoScale);
    }
    wrong += compare(specs, {}, 2, false) + compare(specs, odd, 2, false);
  }
  return wrong > 0;
}

const Comparison kComparisons[] = {{steps_differ, "slot.cuh step.cuh tile.cuh warp.cuh"},
                                   {sums_differ, "measure.cuh sums.cuh"},
                                   {cuts_differ, "scales.cuh"},
                                   {tables_differ, "batch.cuh prepare.cuh step.cu:"},
                                   {repeats_differ, "order.h"},
                                   {rules_differ, "rules.cuh fast_job.cuh adam.cuh fixed.cuh"},
                                   {ties_differ, "dynamic8.cuh codes.cuh code.cuh"},
                                   {codes_differ, "accumulate.cuh mean.cuh"}};

}  // namespace
}  // namespace lowbit

int main() {
  using namespace lowbit;
  return run_mutations(kComparisons, [](const std::string& mistake) {
    for (const char* other :
         {"lowrank", "warp_sum", "muon"}) {  // test_cuda_lowrank_mutations.cpp, ...
      if (mistake.rfind(other, 0) == 0) return false;
    }
    return true;
  });
}
