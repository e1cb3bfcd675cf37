// The unchanged CUDA library, launcher and kernels, on the CPU (cuda_emulator.h): parameters,
// codes, scales and steps in all their phases against the CPU walk, byte for byte.
#include "cuda_emulator.h"
// After the emulator, which replaces the CUDA compiler.
#include "cuda/graph.cu"
#include "cuda/step/step.cu"
#include "cuda_compare.h"

namespace lowbit {
namespace {

/// Every state format with every scale and rounding, in the first slot of a rule with the same
/// sign.
void test_every_format() {
  std::vector<Spec> block, measured;
  const int lengths[] = {32, 64, 128, 256, 512, 1024, 2048};
  for (int f = 0; f < state_count(); ++f) {
    const StateInfo info = state_info(f);
    for (int kind = info.scaled ? kBlock : kNoScale; kind <= (info.cross_tile ? kRank1
                                                              : info.scaled   ? kBlock
                                                                              : kNoScale);
         ++kind) {
      for (const bool stochastic : {false, true}) {
        Spec spec;
        spec.param = f % param_count(), spec.grad = f % grad_count();
        spec.state[0] = spec.state[1] = {0, 0, kNoScale};
        Keep& keep = spec.state[info.is_signed ? 0 : 1];
        keep = {f, lengths[(f + kind + stochastic) % 7], kind, stochastic};
        for (const int turn : {f + kind, f + kind + 1 + stochastic})
          (is_cross_tile(kind) ? measured : block).push_back(shaped(spec, turn));
        if (kind != kBlock) continue;
        spec.rows = 1, spec.cols = 2500, keep.block = lengths[4 + (f + stochastic) % 3];
        block.push_back(spec);
      }
    }
  }
  compare(block, {}, 2);
  compare(measured, {}, 2);
  Options odd;
  odd.odd_grads = true, odd.grad_size = 1e-20f;
  compare(block, odd, 1);
  compare(measured, odd, 1);
}

template <class... U>
bool slot_is_signed_in(int rule, int slot, Types<U...>) {
  bool is_signed = true;
  int i = 0;
  const auto look = [&](const Slot* slots, int count) {
    if (i++ == rule && slot < count) is_signed = slots[slot].is_signed;
  };
  (look(U::kSlot, U::kSlots), ...);
  return is_signed;
}
bool slot_is_signed(int rule, int slot) { return slot_is_signed_in(rule, slot, UpdateRules{}); }

/// Every rule with every parameter format, every gradient format, and several state formats.
void test_every_rule() {
  const int d4 = find_state("dynamic4"), l4 = find_state("linear4_unsigned"),
            log = find_state("log8"), p6 = find_state("power1_6"), c8 = find_state("companded8");
  const Keep ways[][2] = {{{0, 0, kNoScale}, {1, 0, kNoScale, true}},
                          {{2, 64}, {3, 512}},
                          {{d4, 128, kBlock, true}, {l4, 0, kRank1, true}},
                          {{p6, 0, kRow}, {log, 1024}},
                          {{c8, 32}, {l4, 0, kTensor}},
                          {{d4, 0, kColumn}, {3, 0, kColumn}}};
  for (int rule = 0; rule < rule_count(); ++rule) {
    const RuleInfo info = rule_info(rule);
    std::vector<Spec> specs;
    int way = 0;
    for (int param = rule % 3; param < param_count(); param += rule == 0 ? 1 : 3) {
      for (int grad = 0; grad < grad_count(); ++grad) {
        for (int i = 0; i < (grad == 1 ? 4 : 1); ++i, ++way) {
          Spec spec;
          spec.rule = rule, spec.param = param, spec.grad = grad;
          for (int k = 0; k < info.slots; ++k) {
            spec.state[k] = ways[way % 6][k % 2];
            if (!state_info(spec.state[k].format).is_signed && slot_is_signed(rule, k))
              spec.state[k] = ways[way % 6][0];
          }
          specs.push_back(shaped(spec, way + way / 4));
        }
      }
    }
    Spec spec;
    spec.rule = rule;
    for (Keep& keep : spec.state) keep = {0, 0, kNoScale};
    spec.rows = 70, spec.cols = 300;
    specs.push_back(spec);
    spec.rows = 0, specs.push_back(spec);
    spec.rows = 5, spec.cols = 0, specs.push_back(spec);
    spec.rows = 600, spec.cols = 3, specs.push_back(spec);
    // One matrix of several, as on a rank with one expert.
    spec.rows = 1, spec.cols = 330, spec.inside = {6, 55}, spec.more_rows = 3,
    specs.push_back(spec);
    spec.cols = 5000, spec.inside = {100, 50}, specs.push_back(spec);
    spec.more_rows = 0, specs.push_back(spec);
    compare(specs, {}, 3);
    Options odd;
    odd.odd_grads = true;
    compare(specs, odd, 2);
  }
}

/// The common configurations: 8-bit state on bfloat16 and float32 parameters, by the fixed kernels
/// and, if rows are uneven, by the general one.
void test_shapes() {
  const int d8 = find_state("dynamic8"), d8u = find_state("dynamic8_unsigned"),
            full_precision = find_state("float32");
  Options odd;
  odd.odd_grads = true;
  const auto slots = [](const cuda::Fast& f) { return rule_info(f.rule).slots; };
  for (const cuda::Fast& f : cuda::kFast) {
    bool registered = f.rule >= 0 && f.param >= 0 && f.grad >= 0;
    for (int k = 0; k < slots(f); ++k) registered &= f.state[k] >= 0;
    check(registered, "a fixed kernel's formats are registered");
    std::vector<Spec> specs = shapes(f.param, f.grad, f.state[0], f.state[1]);
    for (Spec& spec : specs) {
      spec.rule = f.rule;
      if (slots(f) > 2) spec.state[2] = {f.state[2], spec.state[1].block};
      if (slots(f) > 2) spec.state[1].format = f.state[1];
      for (int k = 0; k < slots(f); ++k) spec.state[k].stochastic = f.drawn[k];
    }
    const bool first = &f == cuda::kFast;
    if (!first && (f.rule != 0 || f.state[0] == d8)) {
      specs.erase(
          std::remove_if(specs.begin(), specs.end(), [](const Spec& s) { return s.cols % 8 != 0; }),
          specs.end());
    }
    if (rule_info(f.rule).factors > 0) {  // matrices inside of rows, one or several
      Spec inside = specs[0];
      inside.rows = 7, inside.cols = 336, inside.inside = {6, 56};
      specs.push_back(inside);
      inside.rows = 2, inside.inside = {3, 2, 56};
      specs.push_back(inside);
      inside.rows = 40, inside.cols = 512, inside.inside = {};
      specs.push_back(inside);
      inside.inside = {8, 64}, inside.more_rows = 3;
      specs.push_back(inside);
      inside.cols = 330, inside.inside = {6, 55};  // for step_any
      specs.push_back(inside);
      inside.rows = 70, inside.cols = 4, inside.inside = {1, 4};  // a depthwise convolution's
      specs.push_back(inside);
      inside.rows = 40, inside.cols = 264, inside.inside = {1, 264};
      specs.push_back(inside);
    }
    for (int k = 0; k < slots(f); ++k) {  // for step_any: a state is rounded in the other way
      Spec other = specs[0];
      other.rows = 2, other.cols = 264;
      other.state[k].stochastic = !f.drawn[k];
      specs.push_back(other);
    }
    compare(specs, odd, 3);
    if (f.rule != 0) compare(specs, {}, 2);
  }
  for (int i = 0; i <= cuda::kFastCount; ++i)
    check(served[i] >= (sample.whole() ? 5 : sample.pieces == 1),
          "kernel " + std::to_string(i) + " was tested");

  std::vector<Spec>
      mixed;  // more than one prepare, every kernel in one call, empty parameters between
  for (int i = 0; i < 1100; ++i) {
    Spec spec;
    spec.param = i % 3, spec.grad = i % 2;
    spec.state[0] = {i % 5 == 0 ? full_precision : d8},
    spec.state[1] = {i % 5 == 0 ? full_precision : d8u};
    spec.rows = i % 7 == 0 ? 0 : 1 + i % 2, spec.cols = 8 + 24 * (i % 13) + i % 5 / 4;
    mixed.push_back(spec);
  }
  compare(mixed, {}, 2);
}

/// Every scaled format in cut rows and blocks, and full-precision state and cross-tile scales.
void test_cut() {
  const int lengths[] = {32, 64, 128, 256, 512, 1024, 2048};
  Options odd;
  odd.odd_grads = true;
  std::vector<Spec> blocks, others;
  for (int f = 0; f < state_count(); ++f) {
    const StateInfo info = state_info(f);
    for (int turn = 0; turn < 3; ++turn) {
      Spec spec;
      spec.param = (f + turn) % param_count(), spec.grad = f % grad_count();
      spec.misaligned = f % 7 == 0 && turn == 0;
      spec.state[0] = spec.state[1] = {0, 0, kNoScale};
      Keep& keep = spec.state[info.is_signed ? 0 : 1];
      keep = {f, lengths[(f + turn) % 7], info.scaled ? kBlock : kNoScale, turn == 1};
      blocks.push_back(cut(spec, f + 4 * turn));
      if (!info.cross_tile || turn > 0) continue;
      keep.kind = kRow + f % 4;
      others.push_back(cut(spec, f % 5));
      others.back().cut = kNoCut;  // no block is cut
    }
  }
  compare(blocks, {}, 2);
  compare(blocks, odd, 2);
  for (int turn = 0; turn < 9; ++turn) {  // blocks together with scales of rows
    Spec spec;
    spec.state[0] = {find_state("dynamic4"), 128}, spec.state[1] = {find_state("log8"), 512};
    others.push_back(cut(spec, turn));
    spec.state[1] = {find_state("dynamic8_unsigned"), 0, turn < 5 ? kRank1 : kRow};
    others.push_back(cut(spec, turn));
  }
  compare(others, odd, 2);

  // Specs without blocks step in one phase, whole rows by the fixed kernels.
  const int before = served[cuda::kAny];
  std::vector<Spec> full_precision;
  for (int turn = 0; turn < 40; ++turn) {
    Spec spec;
    spec.param = turn % 2 == 0 ? 2 : 0, spec.grad = turn % 2 == 0;
    spec.state[0] = spec.state[1] = {0, 0, kNoScale};
    full_precision.push_back(cut(spec, turn % 5));
    full_precision.back().cut = kNoCut;
  }
  const int any = served[cuda::kAny];
  compare(full_precision, {}, 3);
  check(served[cuda::kAny] - any > (sample.whole() ? 40 : 0) && before <= any,
        "some are served in parts");

  for (const char* name : {"adafactor", "adafactor_momentum", "came", "adamw_factored"}) {
    std::vector<Spec> factored;
    for (int turn = 0; turn < 9; ++turn) {
      Spec spec;
      spec.rule = find_rule(name);
      for (int k = 0; k < kMaxSlots; ++k) spec.state[k] = {find_state("dynamic8"), 256};
      factored.push_back(cut(spec, turn));
      if (turn > 1) continue;  // the only matrix that a flat shard touches, and only partly
      spec.rows = 1, spec.cols = 330, spec.inside = {6, 55}, spec.first = 660, spec.more_rows = 3;
      spec.cut = kCutEnds, spec.front = turn * 70, spec.back = 100;
      factored.push_back(spec);
      spec.rows = 3, spec.inside = {6, 5, 11};  // a cut row has several matrices
      factored.push_back(spec);
      spec.rows = 40, spec.cols = 4, spec.inside = {1, 4}, spec.first = 8;
      spec.front = turn, spec.back = 2;
      factored.push_back(spec);
    }
    compare(factored, odd, 3);
  }
}

/// More jobs than one launch of any table, in every phase.
void test_many() {
  std::vector<Spec> factored, measured, cuts;
  for (int i = 0; i < 230; ++i) {
    Spec spec;
    spec.param = i % 3, spec.grad = i % 3;
    spec.rows = i % 11 == 0 ? 0 : 1 + i % 3, spec.cols = 20 + 8 * (i % 5);
    spec.state[0] = {find_state("dynamic8"), 64};
    spec.state[1] = {find_state("linear4_unsigned"), 0, kRank1};
    measured.push_back(spec);
    spec.rule = find_rule("adafactor");
    factored.push_back(spec);
    spec = {};
    spec.state[0] = {find_state("float32"), 0, kNoScale}, spec.state[1] = spec.state[0];
    cuts.push_back(cut(spec, i % 5));
    cuts.back().cut = kNoCut;
  }
  compare(measured, {}, 2);
  compare(factored, {}, 2);
  for (int i = 0; i < 1100; ++i) {  // steps of jobs in several parts: more than one list
    cuts.push_back(cuts[0]);
    Spec& spec = cuts.back();
    spec.rows = 3, spec.cols = 16, spec.front = 8, spec.back = i % 2;
  }
  compare(cuts, {}, 2);
}

void test_options() {
  std::vector<Spec> specs = shapes(2, 1, find_state("dynamic8"), find_state("dynamic8_unsigned"));
  const size_t count = 20;
  specs.resize(count);
  Options o;
  o.maximize = true;
  const float scale = 1024.0f, lr = 3e-3f, none = 0.0f, found = 1.0f, nan = NAN;
  o.grad_scale = &scale, o.lr = &lr, o.found_inf = &none, o.grad_size = 10.0f;
  o.decay = 0.0;
  check(compare(specs, o, 3) == 0, "grad_scale, lr on the device, maximize");
  for (const float* f : {&found, &nan}) {
    o.found_inf = f;
    compare(specs, o, 2);
    std::vector<Spec> cuts, measured, factored;
    for (int turn = 0; turn < 9; ++turn) {
      cuts.push_back(cut({}, turn));
      measured.push_back(shaped({}, turn));
      measured.back().state[0] = {find_state("dynamic8"), 0, turn < 5 ? kRank1 : kColumn};
      factored.push_back(shaped({}, turn));
      factored.back().rule = find_rule("adafactor_momentum");
    }
    Options found_late;
    found_late.found_inf = f;
    for (const auto* list : {&cuts, &measured, &factored}) compare(*list, found_late, 1);
  }
  const auto run = [&](Memory& m, const Options& options) {
    Batched all;
    add_job(all, specs[0], m);
    resolve(all);
    step_cuda(all, options, 0);
  };
  Memory before;
  Batched made;
  add_job(made, specs[0], before);
  std::mt19937 random(1);
  for (int64_t e = 0; e < specs[0].rows * specs[0].cols; ++e)
    put(Memory::at(before.param[0]), "bfloat16", e, draw(random, 1.0f));
  Memory after = before;
  run(after, o);
  check(difference(before, after).empty(), "found_inf leaves everything as it is");
  Options still;
  still.rate = 0.0;
  compare(specs, still, 3);
  after.grad = before.grad;
  put(Memory::at(after.grad), "bfloat16", 3, 1.0f);
  run(after, still);
  check(before.param == after.param && before.state != after.state && after.step == 1.0f,
        "lr = 0 leaves the parameter and moves its state");
}

/// The device's quantizing and dequantizing kernels against the CPU's: every code with scales of
/// all kinds, blocks of all lengths, uneven rows.
void test_codes() {
  check(wrong_codes<Dynamic8>() == 0, "dynamic8: codes on the device");
  check(wrong_codes<Dynamic8Unsigned>() == 0, "dynamic8_unsigned: codes on the device");
  const cpu::Kernels& kernels = cpu::kernels();
  std::mt19937 random(3);
  size_t turn = 0;
  for (int format = 0; format < state_count(); ++format) {
    const StateInfo info = state_info(format);
    if (!info.scaled) continue;
    for (int block = 32; block <= 2048; block *= 2) {
      if (!sample(turn++, static_cast<size_t>(7 * state_count()))) continue;
      const int64_t rows = 12, cols = block > 128 ? 1280 + 1333 * (block / 1024) : 333,
                    blocks = ceil_div(cols, block), row_bytes = code_bytes(cols, info.bits),
                    scale_bytes = blocks * info.scale_bytes;
      const auto at = [](int64_t i) { return static_cast<size_t>(i); };
      std::vector<float> x(at(rows * cols)), back[2];
      std::vector<uint8_t> codes[2], scale[2];
      for (float& v : x) {
        v = draw(random, 1e-3f);
        if (!info.is_signed) v = v < 0.0f ? -v : v;
      }
      for (int64_t i = cols; i < 2 * cols; ++i) x[at(i)] = 0.0f;
      x[at(3 * cols)] = NAN, x[at(4 * cols + 1)] = INFINITY, x[at(5 * cols + 2)] = -INFINITY;
      for (int64_t i = 6 * cols; i < 7 * cols; ++i) x[at(i)] *= 1e-38f;
      for (int64_t i = 7 * cols; i < 8 * cols; ++i) x[at(i)] *= 1e38f;
      for (int on : {0, 1})
        codes[on].resize(at(rows * row_bytes)), scale[on].resize(at(rows * scale_bytes)),
            back[on].resize(x.size());
      CudaCode call{0,    nullptr,  format,          block,          rows,
                    cols, x.data(), codes[1].data(), scale[1].data()};
      check(lowbit_cuda_quantize(&call) == nullptr, "lowbit_cuda_quantize");
      const int64_t tile = std::max(kTile, block);
      const auto tiles = [&](const auto& fn) {
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t col = 0; col < cols; col += tile)
            fn(at(row * cols + col), at(row * row_bytes + code_bytes(col, info.bits)),
               at(row * scale_bytes + col / block * info.scale_bytes),
               static_cast<int>(std::min(tile, cols - col)));
        }
      };
      tiles([&](size_t value, size_t code, size_t stored, int n) {
        cpu::quantize_run(kernels, format, &x[value], &codes[0][code], &scale[0][stored], block, n);
      });
      const std::string name = std::string(info.name) + ", blocks of " + std::to_string(block);
      check(codes[0] == codes[1], "quantize " + name);
      check(scale[0] == scale[1], "scales " + name);
      if (info.bits == 8 || info.bits == 4) {
        for (size_t i = 0; i < codes[0].size(); ++i) codes[0][i] = static_cast<uint8_t>(i);
      }
      if (info.scale_bytes == 4) {
        const float scales[] = {1.0f, 0.0f, NAN, 3.7e-5f, 3e38f, 1.1754944e-38f};
        for (size_t i = 0; i < scale[0].size() / 4; i += 1 + i % 2)
          std::memcpy(&scale[0][4 * i], scales + i % 6, 4);
      }
      call.values = back[1].data(), call.codes = codes[0].data(), call.scales = scale[0].data();
      check(lowbit_cuda_dequantize(&call) == nullptr, "lowbit_cuda_dequantize");
      tiles([&](size_t value, size_t code, size_t stored, int n) {
        kernels.dequantize[format](&codes[0][code], &scale[0][stored], block, &back[0][value], n);
      });
      bool same = true;
      for (size_t i = 0; i < x.size(); ++i)
        same &= float_bits(canonical(back[0][i])) == float_bits(canonical(back[1][i]));
      check(same, "dequantize " + name);
    }
  }
}

/// How often bytes of state and of compensation are read and written.
struct Moved {
  const unsigned char* at;
  std::vector<int> read, written;
};
std::vector<Moved> moved;
void count_move(const void* at, size_t bytes, bool written) {
  for (Moved& m : moved) {
    const auto from = reinterpret_cast<uintptr_t>(at) - reinterpret_cast<uintptr_t>(m.at);
    if (from >= m.read.size()) continue;  // also counts memory before the margins
    for (size_t i = from; i < from + bytes && i < m.read.size(); ++i)
      ++(written ? m.written : m.read)[i];
  }
}

/// Every fixed kernel moves each byte of state once in each direction, as stepping over a bus
/// requires.
void test_once() {
  for (const cuda::Fast& f : cuda::kFast) {
    Spec spec;
    spec.rule = f.rule, spec.param = f.param, spec.grad = f.grad;
    spec.rows = 9, spec.cols = 776;
    const int slots = rule_info(f.rule).slots;
    for (int k = 0; k < slots; ++k)
      spec.state[k] = {f.state[k], 128, state_info(f.state[k]).scaled ? kBlock : kNoScale,
                       f.drawn[k]};
    Memory memory;
    Batched all;
    add_job(all, spec, memory);
    all = {};
    add_job(all, spec, memory);
    resolve(all);
    const Job& job = all.jobs[0];
    check(&cuda::kFast[cuda::kernel_of(job)] == &f, spec.name() + ": served by its own kernel");
    if (f.measure[0] != nullptr)
      check(&cuda::kFast[cuda::measure_kernel_of(job)] == &f, spec.name() + ": measured likewise");
    moved.clear();
    const auto watch = [](const void* at, int64_t bytes) {
      const std::vector<int> none(static_cast<size_t>(bytes));
      moved.push_back({static_cast<const unsigned char*>(at), none, none});
    };
    const int64_t n = spec.rows * spec.cols;
    for (int k = 0; k < slots; ++k) watch(job.state[k].values, n * state_info(f.state[k]).bits / 8);
    if (job.compensation != nullptr)
      watch(job.compensation, n * param_info(f.param).compensation_bytes);
    for (int phase = 0; phase < phases_of(all); ++phase) step_cuda(all, {}, phase);
    emulator::moves = count_move;
    step_cuda(all, {}, phases_of(all));
    emulator::moves = nullptr;
    bool once = true;
    for (const Moved& m : moved) {
      for (size_t i = 0; i < m.read.size(); ++i) once &= m.read[i] == 1 && m.written[i] == 1;
    }
    check(once, spec.name() + ": each byte of state is read once and written once");
    sample.report(1, !once, spec.name());
  }
}

void test_accumulate() {
  check(wrong_sums() == 0, "gradients added on the device");
  check(wrong_means() == 0, "means of gradients on the device");
  for (const auto& [count, launches] : {std::pair{1, 1}, {256, 1}, {257, 2}, {600, 3}}) {
    const ManySums many = many_sums(count);
    const std::string what = std::to_string(count) + " buffers";
    check(many.wrong == 0, what + " in one call");
    check(many.launches == launches, what + " take " + std::to_string(many.launches) + " launches");
  }
}

struct PlantedShared {
  int at[2][2 * cuda::kLanes];  // a location is reported once
};
/// Every thread reads what its neighbor in the warp, or in another warp, wrote: after a barrier of
/// the block, a barrier of the warp, or only a shuffle.
template <bool kAcross, bool kAll, bool kWarp>  // each is reported once
__global__ void planted(int* out) {
  LB_SHARED(PlantedShared, shared);
  const int thread = static_cast<int>(threadIdx.x);
  shared.at[kAcross][thread] = thread;
  if (kAll) __syncthreads();
  if (kWarp) __syncwarp();
  __shfl_xor_sync(cuda::kAllLanes, 0, 1);
  out[thread] = shared.at[kAcross][thread ^ (kAcross ? cuda::kLanes : 1)];
}

/// Only under the thread sanitizer: it detects a race and reports no false one.
void test_races() {
  if (!emulator::races::kSeen) return;
  int out[2 * cuda::kLanes];
  const auto seen = [&](auto kernel) {
    const int before = emulator::races::reports;
    emulator::machine.launch({1}, {2 * cuda::kLanes}, [&] { kernel(out); });
    const bool found = emulator::races::reports > before;
    emulator::races::reports = before;
    return found;
  };
  check(!seen(planted<false, true, false>) && !seen(planted<true, true, false>),
        "a barrier of all orders all");
  check(!seen(planted<false, false, true>), "a barrier of the warp orders the warp");
  check(seen(planted<true, false, true>), "and not the next warp");
  check(seen(planted<false, false, false>), "a shuffle orders nothing");
}

}  // namespace
}  // namespace lowbit

int main(int argc, char** argv) {
  const std::pair<const char*, void (*)()> tests[] = {{"codes", lowbit::test_codes},
                                                      {"every_format", lowbit::test_every_format},
                                                      {"every_rule", lowbit::test_every_rule},
                                                      {"shapes", lowbit::test_shapes},
                                                      {"cut", lowbit::test_cut},
                                                      {"many", lowbit::test_many},
                                                      {"options", lowbit::test_options},
                                                      {"once", lowbit::test_once},
                                                      {"accumulate", lowbit::test_accumulate},
                                                      {"races", lowbit::test_races}};
  for (const auto& [name, test] : tests) {
    if (argc < 2 || std::strcmp(argv[1], name) == 0) test();
  }
  check(emulator::races::reports == 0, "no two threads of a block race");
  return finish();
}
