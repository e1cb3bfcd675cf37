// The time of whole steps on this processor: every rule, every pair of state formats, nearest and
// stochastic, and every parameter format, beside 8-bit AdamW. Both take turns in one process, and
// each time is the minimum over many short turns, so that ratios hold on a machine that is shared.
//
//   cmake --build build/lowbit --target bench_steps
//   build/lowbit/tests/cpp/bench_steps [ISA,...|-] [rules|formats|params|-] [NAME|-] [quick|count]
//
// One line for each step and instruction set, between tabs: instruction set, list, name, bytes per
// parameter, ns per parameter in the second-level cache and of AdamW beside it, the same in memory.
// With `count`, instead of times: instructions, those of vectors, divisions and square roots for
// each register of values (16 with AVX-512, 8 with AVX2, 4 otherwise).
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "catalog/catalog.h"
#include "catalog/coefficients.h"
#include "core/exact_sum.h"
#include "core/half.h"
#include "core/registry.h"
#include "count.h"
#include "cpu/step.h"

namespace {

using namespace lowbit;

/// What to step.
struct Spec {
  std::string rule = "adamw";
  std::string with_sign = "dynamic8", without_sign = "dynamic8_unsigned";
  std::string param = "bfloat16_stochastic";
  bool stochastic = false;
};

double hyper_of(const std::string& name) {
  static const std::map<std::string, double> values = {
      {"lr", 1e-5},          {"beta1", 0.9},
      {"beta2", 0.999},      {"beta3", 0.9999},
      {"eps", 1e-8},         {"eps1", 1e-30},
      {"eps2", 1e-3},        {"d", 1.0},
      {"momentum", 0.9},     {"weight_decay", 0.01},
      {"beta2_decay", -0.8}, {"fira_margin", -1.0},
      {"alpha", 5.0},        {"trust_coefficient", 1e-3},
      {"ratio", 1.0},        {"average", 0.1}};
  const auto at = values.find(name);
  return at == values.end() ? 0.0 : at->second;
}

std::vector<double> hypers_of(int rule) {
  std::vector<double> hyper;
  const auto take = [&]<class U>(U*) {
    for (const char* name : U::kHyper) hyper.push_back(hyper_of(name));
    if (std::string(U::kName).rfind("adafactor", 0) == 0) hyper[2] = -1.0;  // no beta2
  };
  int i = 0;
  [&]<class... U>(Types<U...>) {
    ((i++ == rule ? take(static_cast<U*>(nullptr)) : void()), ...);
  }(UpdateRules{});
  return hyper;
}

/// A parameter [rows, cols] with gradient and state, and the step over it.
class Subject {
 public:
  Subject(const Spec& spec, int64_t rows, int64_t cols) : hyper_(hypers_of(find_rule(spec.rule))) {
    const RuleInfo rule = rule_info(find_rule(spec.rule));
    const ParamInfo param = param_info(find_param(spec.param));
    const int64_t n = rows * cols;
    const bool wide = param.bytes == 4, half = std::string(param.dtype) == "float16";
    const int grad_format = wide ? 0 : half ? 2 : 1;
    job_.rule = find_rule(spec.rule), job_.param_format = find_param(spec.param);
    job_.grad_format = grad_format;
    job_.rows = rows, job_.cols = job_.global_cols = cols, job_.numel = n;
    job_.batches = 1, job_.inner_rows = job_.global_inner_rows = rows;
    job_.inner_cols = job_.global_inner_cols = cols;
    job_.tile = kTile, job_.write_param = true;
    job_.param = room(n * param.bytes), job_.grad = room((n + kShifts) * grad_bytes(grad_format));
    if (param.compensation_bytes > 0) job_.compensation = room(n * param.compensation_bytes);
    traffic_ = 2.0 * (param.bytes + param.compensation_bytes) + grad_bytes(grad_format);
    std::mt19937 engine(3);
    std::normal_distribution<float> normal;
    std::vector<float> some(65536);  // repeated
    for (float& x : some) x = normal(engine);
    for (int64_t i = 0; i < n + kShifts; ++i) {
      const float at = some[static_cast<size_t>(i + i / 65536) % some.size()];
      if (i < n) put(job_.param, i, 0.02f * at, wide, half);
      put(const_cast<void*>(job_.grad), i, 1e-3f * some[static_cast<size_t>(i * 7) % some.size()],
          wide, half);
    }
    for (int k = 0; k < rule.slots; ++k) add_slot(job_.state[k], rule.slot[k], spec, n);
    for (int k = 0; k < rule.factors; ++k) {
      Factor& f = job_.factor[k];
      f.row = static_cast<float*>(room(rows * 4)), f.col = static_cast<float*>(room(cols * 4));
      f.scaled = static_cast<float*>(room(rows * 4));
      f.row_sums = static_cast<int64_t*>(room(rows * ExactSum::kWords * 8));
      f.col_sums = static_cast<int64_t*>(room((cols + 1) * ExactSum::kWords * 8));
    }
    job_.totals = static_cast<int64_t*>(room(3 * kMaxTotals * ExactSum::kWords * 8));
    job_.numbers = static_cast<float*>(room(kMaxNumbers * 4));
    job_.random = random_key(5, 7, 9);
    for (int r = 0; r < rule.rounds; ++r) {
      traffic_ += grad_bytes(grad_format);
      if ((rule.reads[r] & kReadsParam) != 0) traffic_ += param.bytes + param.compensation_bytes;
      if ((rule.reads[r] & kReadsState) != 0) traffic_ += state_traffic_ / 2;
    }
    for (int i = 0; i < 3; ++i) step();
  }

  /// Bytes per parameter.
  double traffic() const { return traffic_ + state_traffic_; }

  /// As csrc/ops/step_cpu.cpp steps a single tensor with one thread.
  void step() {
    const RuleInfo rule = rule_info(job_.rule);
    const cpu::Kernels& kernels = cpu::kernels();
    Job job = job_;
    prepare(job, hyper_.data(), ++steps_, 1.0);
    // Another gradient in each step, without more memory: the same one from another place on.
    job.grad = static_cast<const char*>(job.grad) +
               steps_ * 37 % (kShifts / 32) * 32 * grad_bytes(job.grad_format);
    std::memset(job.totals, 0, 3 * kMaxTotals * ExactSum::kWords * 8);
    for (int r = 0; r < rule.rounds; ++r) {
      const int k = rule.grid_factor[r];
      if (k >= 0) begin_sums(job, job.factor[k]);
      cpu::measure(job, r, 0, cpu::measure_parts(job, r), kernels);
      if (k >= 0) {
        int64_t* total = job.totals + (r * kMaxTotals + kGridTotal) * ExactSum::kWords;
        exact_merge_columns(job.factor[k].col_sums, job.inner_cols, job.inner_rows, total);
        finalize_factor(job, r);
      }
      finalize(job, r, true);
    }
    cpu::lengthen_tiles(job);
    cpu::step(job, 0, job.tiles(), kernels);
  }

 private:
  static constexpr int64_t kShifts = 2048;  // gradients, 64 bytes (or 128) apart
  void* room(int64_t bytes) {
    memory_.emplace_back(new char[static_cast<size_t>(bytes) + 4096]());
    return memory_.back().get();
  }
  static void put(void* to, int64_t i, float x, bool wide, bool half) {
    if (wide) {
      static_cast<float*>(to)[i] = x;
    } else {
      static_cast<uint16_t*>(to)[i] = half ? half_nearest(x) : bfloat16_nearest(x);
    }
  }
  void add_slot(StateSlot& slot, const Slot& of, const Spec& spec, int64_t n) {
    // As the presets: weights and means over thousands of steps stay in bfloat16.
    const bool plain = of.is_weight || of.is_slow;
    slot.format = find_state(plain          ? "bfloat16"
                             : of.is_signed ? spec.with_sign
                                            : spec.without_sign);
    const StateInfo info = state_info(slot.format);
    slot.block = info.scaled ? info.block : 0;
    slot.kind = info.scaled ? kBlock : kNoScale;
    slot.stochastic = plain || spec.stochastic;
    slot.values = room(code_bytes(n, info.bits));
    const int64_t scales = info.scaled ? n / info.block * info.scale_bytes : 0;
    if (info.scaled) slot.scales = room(scales);
    const auto bytes = static_cast<double>(code_bytes(n, info.bits) + scales);
    state_traffic_ += 2.0 * bytes / static_cast<double>(n);
    const std::vector<float> zeros(static_cast<size_t>(kMaxTile));
    for (int64_t at = 0; info.scaled && at < n; at += kTile)
      cpu::quantize_run(cpu::kernels(), slot.format, zeros.data(),
                        static_cast<char*>(slot.values) + code_bytes(at, info.bits),
                        static_cast<char*>(slot.scales) + at / info.block * info.scale_bytes,
                        info.block, kTile);
  }
  static void begin_sums(const Job& job, const Factor& f) {
    std::memset(f.row_sums, 0, static_cast<size_t>(job.inner_rows) * ExactSum::kWords * 8);
    std::memset(f.col_sums, 0, static_cast<size_t>(job.inner_cols + 1) * ExactSum::kWords * 8);
    exact_add(f.row, static_cast<int>(job.inner_rows),
              f.col_sums + job.inner_cols * ExactSum::kWords);
  }

  Job job_{};
  std::vector<double> hyper_;
  std::vector<std::unique_ptr<char[]>> memory_;
  double traffic_ = 0.0, state_traffic_ = 0.0;
  int64_t steps_ = 0;
};

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The best of the turns of both, ns per parameter.
struct Pair {
  double own = 1e30, adamw = 1e30;
};
Pair compare(Subject& own, Subject& adamw, int64_t n, double budget) {
  Pair best;
  const double begin = seconds();
  for (int turn = 0; turn < 8 || (seconds() - begin < budget && turn < 400); ++turn) {
    for (auto [subject, time] : {std::pair{&own, &best.own}, std::pair{&adamw, &best.adamw}}) {
      const double start = seconds();
      subject->step();
      *time = std::min(*time, (seconds() - start) / static_cast<double>(n) * 1e9);
    }
    if (turn >= 3 && seconds() - begin > 4 * budget) break;
  }
  return best;
}

std::vector<std::pair<std::string, Spec>> formats() {
  std::vector<std::pair<std::string, Spec>> all;
  const auto add = [&](const std::string& with_sign, const std::string& without_sign) {
    for (const bool stochastic : {false, true}) {
      if (stochastic && with_sign == "float32") continue;
      const std::string name =
          with_sign == without_sign ? with_sign : with_sign + ", " + without_sign;
      all.push_back({name + (stochastic ? ", stochastic" : ""),
                     {"adamw", with_sign, without_sign, "bfloat16_stochastic", stochastic}});
    }
  };
  for (const char* map : {"dynamic", "linear", "power1_", "power2_"}) {
    for (int bits = 8; bits >= 2; --bits)
      add(map + std::to_string(bits), map + std::to_string(bits) + "_unsigned");
  }
  add("uniform8", "linear8_unsigned");
  add("float8_e4m3", "float8_e4m3_unsigned"), add("float8_e5m2", "float8_e5m2_unsigned");
  add("companded8", "companded8_unsigned"), add("log8_signed", "log8");
  add("dynamic8", "log8"), add("dynamic8", "log8_fixed"), add("dynamic8", "log16");
  add("bfloat16", "bfloat16"), add("float32", "float32");
  return all;
}

void time(const char* list, const std::string& name, const Spec& spec, bool quick) {
  double bytes = 0.0;
  Pair found[2];
  for (int where = 0; where < 2; ++where) {
    const int64_t rows = where == 0 ? 256 : 2048, cols = where == 0 ? 256 : 2048;
    if (quick && where == 1) continue;
    Subject own(spec, rows, cols), adamw(Spec{}, rows, cols);
    bytes = own.traffic();
    found[where] = compare(own, adamw, rows * cols, where == 0 ? 0.06 : 0.4);
  }
  std::printf("%s\t%s\t%s\t%.2f\t%.3f\t%.3f\t%.3f\t%.3f\n", cpu::kernels().isa, list, name.c_str(),
              bytes, found[0].own, found[0].adamw, found[1].own, found[1].adamw);
  std::fflush(stdout);
}

void count(const char* list, const std::string& name, const Spec& spec) {
  constexpr int64_t kRows = 32, kCols = 256;  // tall: columns' sums are finished once
  Subject subject(spec, kRows, kCols);
  Count found;
  if (!count_instructions([&] { subject.step(); }, found)) {
    std::fprintf(stderr, "a process may not trace its child here\n");
    std::exit(1);
  }
  const std::string isa = cpu::kernels().isa;
  const int lanes = isa.rfind("avx512", 0) == 0 ? 16 : isa == "avx2" ? 8 : 4;
  const double registers = static_cast<double>(kRows * kCols) / lanes;
  const auto each = [&](int64_t n) { return static_cast<double>(n) / registers; };
  std::printf("%s\t%s\t%s\t%.2f\t%.1f\t%.1f\t%.2f\t%.2f\n", isa.c_str(), list, name.c_str(),
              subject.traffic(), each(found.all), each(found.of_vectors()), each(found.divisions),
              each(found.roots));
  std::fflush(stdout);
}

}  // namespace

int main(int words, char** given) {
  const auto word = [&](int i) { return std::string(i < words ? given[i] : "-"); };
  const bool quick = word(4) == "quick", counts = word(4) == "count";
  const auto run = [&](const char* list, const std::string& name, const Spec& spec) {
    if (counts) return count(list, name, spec);
    time(list, name, spec, quick);
  };
  std::string isas = word(1) == "-" ? "avx512vbmi,avx2" : word(1);
  for (size_t at = 0; at < isas.size();) {
    const size_t end = std::min(isas.find(',', at), isas.size());
    const std::string isa = isas.substr(at, end - at);
    at = end + 1;
    if (!cpu::set_isa(isa.c_str())) {
      std::fprintf(stderr, "this processor does not run %s\n", isa.c_str());
      continue;
    }
    const auto wanted = [&](const char* list, const std::string& name) {
      return (word(2) == "-" || word(2) == list) &&
             (word(3) == "-" || name.find(word(3)) != std::string::npos);
    };
    for (int r = 0; r < rule_count(); ++r) {
      Spec spec;
      spec.rule = rule_info(r).name;
      if (wanted("rules", spec.rule)) run("rules", spec.rule, spec);
    }
    for (const auto& [name, spec] : formats()) {
      if (wanted("formats", name)) run("formats", name, spec);
    }
    for (int p = 0; p < param_count(); ++p) {
      Spec spec;
      spec.param = param_info(p).name;
      if (wanted("params", spec.param)) run("params", spec.param, spec);
    }
  }
  return 0;
}
