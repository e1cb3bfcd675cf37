// Compares the CUDA library in the emulator with the CPU walk, byte for byte. Include after
// cuda_emulator.h and cuda/step/step.cu.
#pragma once

#include <algorithm>
#include <cmath>

#include "catalog/coefficients.h"
#include "core/mean_bins.h"
#include "core/registry.h"
#include "cpu/gradient.h"
#include "cpu/mean.h"
#include "cpu/step.h"
#include "cuda/tables.cpp"
#include "cuda_specs.h"

namespace lowbit {
namespace {

/// A value for the hyperparameter `name`.
double hyper_value(const std::string& name) {
  const std::pair<const char*, double> known[] = {
      {"lr", 1e-2},           {"beta1", 0.9},
      {"beta2", 0.99},        {"beta3", 0.95},
      {"eps", 1e-8},          {"eps1", 1e-20},
      {"eps2", 1e-3},         {"d", 1.0},
      {"weight_decay", 1e-2}, {"beta2_decay", -0.8},
      {"update_proj_gap", 2}, {"decay_by", 2.0},
      {"relative_step", 0.0}, {"fira_margin", 0.1},
      {"scale_parameter", 1}, {"trust_coefficient", 1e-2}};
  for (const auto& [known_name, value] : known) {
    if (name == known_name) return value;
  }
  return 0.5;
}
template <class... U>
std::vector<double> hyper_of(int rule, Types<U...>) {
  std::vector<double> values;
  int i = 0;
  const auto fill = [&](const char* const* names, int count) {
    if (i++ != rule) return;
    for (int k = 0; k < count; ++k) values.push_back(hyper_value(names[k]));
  };
  (fill(U::kHyper, U::kHypers), ...);
  return values;
}

struct Options {
  const float *lr = nullptr, *grad_scale = nullptr, *found_inf = nullptr;
  bool maximize = false;
  float grad_size = 1e-2f;
  bool odd_grads = false;  // NaN, infinities, huge and tiny values
  double decay = -1.0;     // weight_decay, unless negative
  double rate = -1.0;      // lr, unless negative
  double beta1 = -1.0;
  std::vector<float> given{};  // gradients, repeated
  bool repeats = true;         // whether the table stays between steps
  std::vector<double> hyper(int rule) const {
    std::vector<double> values = hyper_of(rule, UpdateRules{});
    if (decay >= 0.0) values[4] = decay;
    if (rate >= 0.0) values[0] = rate;
    if (beta1 >= 0.0) values[1] = beta1;
    return values;
  }
};

int phases_of(const Batched& all) {
  return rule_info(all.jobs[0].rule).rounds + (!all.measured.empty() || all.cuts);
}

/// For each column, the minimum of the maxima over the dimensions after the first.
void combine(const Measured& m, int64_t cols, uint32_t* out) {
  for (int64_t c = 0; c < cols; ++c) {
    out[c] = ~0u;
    int64_t inner = cols;
    for (size_t d = 1; d < m.dims.size(); ++d) {
      inner /= m.dims[d];
      const auto* bits = reinterpret_cast<const uint32_t*>(m.absmax[d]);
      out[c] = std::min(out[c], bits[c / inner % m.dims[d]]);
    }
  }
}

/// Runs a phase on the CPU, as csrc/ops/step_cpu.cpp does.
void step_cpu(Batched& all, const Options& o, int phase) {
  if (o.found_inf && *o.found_inf != 0.0f) return;
  const RuleInfo rule = rule_info(all.jobs[0].rule);
  std::vector<double> hyper = o.hyper(all.jobs[0].rule);
  if (o.lr) hyper[0] = *o.lr;
  const int phases = phases_of(all);
  std::vector<Job> jobs = all.jobs;
  for (size_t i = 0; i < jobs.size(); ++i) {
    Job& job = jobs[i];
    if (phase == 0) *all.steps[i] += 1.0f;
    const int64_t t = std::llrint(*all.steps[i]);
    lowbit::prepare(job, hyper.data(), t,
                    (o.maximize ? -1.0 : 1.0) / (o.grad_scale ? *o.grad_scale : 1.0));
    job.random.step = static_cast<uint32_t>(t);
    job.write_param = hyper[0] != 0.0;
    for (int r = 0; r < std::min(phase, rule.rounds); ++r) {
      if (r == phase - 1 && rule.grid_factor[r] >= 0) finalize_factor(job, r);
      finalize(job, r, phase == phases);
    }
  }
  for (const Measured& m : all.measured) {
    if (m.combined())
      combine(m, jobs[m.job].cols, const_cast<uint32_t*>(jobs[m.job].state[m.slot].col_absmax));
  }
  const cpu::Kernels& kernels = cpu::kernels();
  if (phase < rule.rounds) {
    const int k = rule.grid_factor[phase];
    if (k >= 0) {
      std::fill(all.scratch.rows.begin(), all.scratch.rows.end(), 0);
      std::fill(all.scratch.cols.begin(), all.scratch.cols.end(), 0);
    }
    for (const Job& job : jobs) {
      for (int64_t b = 0; k >= 0 && b < job.batches; ++b) {
        const int64_t last = b * (job.inner_cols + 1) + job.inner_cols;
        // The matrices of a row that begins elsewhere.
        const int64_t skipped = job.front > 0 ? job.cols / job.inner_cols : 0;
        for (int64_t r = std::max<int64_t>(0, skipped - b * job.inner_rows); r < job.inner_rows;
             ++r)
          exact_add(job.factor[k].row[b * job.inner_rows + r],
                    job.factor[k].col_sums + last * ExactSum::kWords);
      }
      cpu::measure(job, phase, 0, cpu::measure_parts(job, phase), kernels);
      int64_t* total = job.totals + (phase * kMaxTotals + kGridTotal) * ExactSum::kWords;
      for (int64_t c = 0; k >= 0 && job.one_matrix() && c < job.inner_cols; ++c) {
        exact_merge(job.factor[k].col_sums + c * ExactSum::kWords, total);
        exact_carry(total);
      }
    }
    return;
  }
  if (phase < phases) {
    for (const Job& job : jobs) {
      if (job.measured_rows(rule.slots) > 0)
        cpu::measure_scales(job, 0, cpu::scale_parts(job), kernels);
    }
    return;
  }
  for (const Measured& m : all.measured) {
    if (!m.combined()) continue;
    const Job& job = jobs[m.job];
    int64_t inner = job.cols;
    for (size_t d = 1; d < m.dims.size(); ++d) {
      auto* bits = reinterpret_cast<uint32_t*>(m.absmax[d]);
      std::fill_n(bits, m.dims[d], 0u);
      inner /= m.dims[d];
      for (int64_t c = 0; c < job.cols; ++c) {
        uint32_t& b = bits[c / inner % m.dims[d]];
        const uint32_t absmax = job.state[m.slot].col_next[c];
        b = std::max(b, absmax > kInfinityBits ? kCanonicalNan : absmax);
      }
    }
    combine(m, job.cols, job.state[m.slot].col_next);
  }
  for (Job job : jobs) {  // a copy: the scales below use its original rows
    // Elements of a cut row that are not local are written with their tile. Both sides must do the
    // same.
    if (job.cut == kNoCut && job.front == 0 && job.back == 0) cpu::lengthen_tiles(job);
    if (job.tiles() > 0) cpu::step(job, 0, job.tiles(), kernels);
  }
  for (const Job& job : jobs) cpu::write_cut_scales(job, kernels);
  for (const Measured& m : all.measured) {
    const StateSlot& slot = jobs[m.job].state[m.slot];
    const auto keep = [](float* to, const uint32_t* from, int64_t n) {
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = from[i] > kInfinityBits ? kCanonicalNan : from[i];
        std::memcpy(to + i, &bits, 4);
      }
    };
    if (slot.row_next) keep(m.absmax[0], slot.row_next, slot.row_stride ? jobs[m.job].rows : 1);
    if (slot.col_next && !m.combined()) keep(m.absmax.back(), slot.col_next, jobs[m.job].cols);
  }
}

/// The library as csrc/ops finds it.
cuda::Library emulated() {
  cuda::Library library{};
  library.plan = lowbit_cuda_plan, library.discard = lowbit_cuda_discard;
  library.retain = lowbit_cuda_retain, library.step = lowbit_cuda_step;
  return library;
}
/// Memory of a table, which ends with garbage.
cuda::TableMemory allocate_table(int64_t bytes) {
  const auto pieces = static_cast<size_t>(bytes) / sizeof(Piece) + 1;
  auto* memory = new Bytes(pieces);
  std::memset(memory->data(), 0xff, pieces * sizeof(Piece));
  const std::shared_ptr<void> owner(memory, [](void* at) {
    auto* ended = static_cast<Bytes*>(at);
    std::memset(ended->data(), 0xff, ended->size() * sizeof(Piece));
    delete ended;
  });
  return {memory->data(), owner};
}

/// tables: what the steps before have left, or null: the step leaves nothing.
void step_cuda(Batched& all, const Options& o, int phase, cuda::Tables* tables = nullptr,
               void* stream = nullptr) {
  std::vector<CudaScale> scales;
  for (const Measured& m : all.measured) {
    const Job& job = all.jobs[m.job];
    const StateSlot& slot = job.state[m.slot];
    CudaScale s{};
    for (size_t d = 0; d < m.absmax.size(); ++d) s.absmax[d] = m.absmax[d];
    s.count = static_cast<int>(m.dims.size());
    for (size_t d = 0; d < m.dims.size(); ++d) s.dims[d] = m.dims[d];
    if (m.combined()) s.col_absmax = const_cast<uint32_t*>(slot.col_absmax);
    s.row_next = slot.row_next, s.col_next = slot.col_next;
    s.rows = slot.row_stride ? job.rows : 1, s.cols = job.cols;
    scales.push_back(s);
  }
  const std::vector<double> hyper = o.hyper(all.jobs[0].rule);
  CudaStep call{};
  call.jobs = all.jobs.data(), call.count = static_cast<int64_t>(all.jobs.size());
  call.phase = phase, call.phases = phases_of(all);
  call.steps = all.steps.data();
  call.hyper = hyper.data(), call.hypers = static_cast<int>(hyper.size());
  call.lr = o.lr, call.grad_scale = o.grad_scale, call.found_inf = o.found_inf,
  call.maximize = o.maximize;
  call.scales = scales.data(), call.scale_count = static_cast<int64_t>(scales.size());
  call.sums[0] = all.scratch.rows.data(), call.sums[1] = all.scratch.cols.data();
  call.sums_bytes[0] = static_cast<int64_t>(all.scratch.rows.size() * sizeof(int64_t));
  call.sums_bytes[1] = static_cast<int64_t>(all.scratch.cols.size() * sizeof(int64_t));
  std::vector<const void*> grads;
  for (const Job& job : all.jobs) grads.push_back(job.grad);
  call.grads = grads.data(), call.stream = stream;
  const char* error = tables != nullptr ? tables->step(emulated(), call, allocate_table)
                                        : cuda::Tables::step_once(emulated(), call, allocate_table);
  check(error == nullptr, std::string("lowbit_cuda_step: ") + (error ? error : ""));
}

/// Describes the first difference between the two, or returns an empty string.
std::string difference(const Memory& a, const Memory& b) {
  if (a.param[0] != b.param[0]) return "parameter";
  if (a.param[1] != b.param[1]) return "compensation";
  for (size_t k = 0; k < a.state.size(); ++k) {
    if (a.state[k] != b.state[k]) return "state tensor " + std::to_string(k);
  }
  return float_bits(a.step) != float_bits(b.step) ? "step" : "";
}

/// Whether the grid totals of all jobs with several matrices are unchanged: shards with other
/// matrices add to them.
bool totals_are_of_one_matrix(const Batched& all) {
  for (const Job& job : all.jobs) {
    const RuleInfo rule = rule_info(job.rule);
    for (int r = 0; r < rule.rounds; ++r) {
      if (rule.grid_factor[r] < 0 || rule.totals[r] > kGridTotal || job.one_matrix()) continue;
      const int64_t* words = job.totals + (r * kMaxTotals + kGridTotal) * ExactSum::kWords;
      if (std::any_of(words, words + ExactSum::kWords, [](int64_t word) { return word != 0; }))
        return false;
    }
  }
  return true;
}

/// How many jobs each kernel processed.
int served[cuda::kFastCount + 1];

/// Steps all specs of one rule `steps` times on both sides, each phase in one call. Returns the
/// number of specs that differ.
int compare(const std::vector<Spec>& list, const Options& options, int steps, bool report = true) {
  const std::vector<Spec> specs = sample.of_list(list);
  if (specs.empty()) return 0;
  steps = sample.steps(steps);
  std::mt19937 random(5);
  std::vector<Memory> memory[2];
  Batched all[2];
  memory[0].resize(specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    add_job(all[0], specs[i], memory[0][i]);
    for (int64_t e = 0; e < specs[i].numel(); ++e)
      put(static_cast<unsigned char*>(all[0].jobs[i].param), param_info(specs[i].param).dtype, e,
          draw(random, 1.0f));
  }
  memory[1] = memory[0];
  for (size_t i = 0; i < specs.size(); ++i) add_job(all[1], specs[i], memory[1][i]);
  all[0] = {};
  for (size_t i = 0; i < specs.size(); ++i) add_job(all[0], specs[i], memory[0][i]);
  for (Batched& b : all) resolve(b);
  for (const Job& job : all[1].jobs) {
    for (const Job& part : cuda::parts_of(job)) ++served[cuda::kernel_of(part)];
  }
  std::vector<std::string> where(specs.size());
  cuda::Tables tables;
  for (int s = 0; s < steps; ++s) {
    for (size_t i = 0; i < specs.size(); ++i) {
      for (int64_t e = 0; e < specs[i].numel(); ++e) {
        float g = draw(random, options.grad_size);
        if (!options.given.empty())
          g = options.given[static_cast<size_t>(e) % options.given.size()];
        if (options.odd_grads && e % 701 == 5 * s) {
          const float odd[] = {
              NAN, INFINITY, -INFINITY, 3e38f, 1e-42f, -1e-30f, bits_float(0xffc12345u)};
          g = odd[random() % 7];
        }
        for (int on : {0, 1})
          put(Memory::at(memory[on][i].grad), grad_dtype(specs[i].grad), specs[i].misaligned + e,
              g);
      }
    }
    for (Batched& b : all) forget(b.scratch);
    std::vector<Bytes> grads;  // elsewhere in each step, if the table stays
    for (size_t i = 0; options.repeats && s > 0 && i < specs.size(); ++i) {
      grads.push_back(memory[1][i].grad);
      all[1].jobs[i].grad =
          Memory::at(grads.back()) + specs[i].misaligned * grad_bytes(specs[i].grad);
      std::memset(memory[1][i].grad.data(), 0x55, memory[1][i].grad.size() * sizeof(Piece));
    }
    for (int phase = 0; phase <= phases_of(all[0]); ++phase) {
      step_cpu(all[0], options, phase);
      step_cuda(all[1], options, phase, options.repeats ? &tables : nullptr);
    }
    for (const int on : {0, 1}) {
      if (report)
        check(totals_are_of_one_matrix(all[on]),
              std::string("one of several matrices is no total, by ") + (on ? "CUDA" : "the CPU"));
    }
    for (size_t i = 0; i < specs.size(); ++i) {
      if (!where[i].empty()) continue;
      where[i] = difference(memory[0][i], memory[1][i]);
      if (!where[i].empty()) where[i] += " after step " + std::to_string(s + 1);
    }
  }
  int differ = 0;
  for (size_t i = 0; i < specs.size(); ++i) {
    differ += !where[i].empty();
    if (report) check(where[i].empty(), specs[i].name() + ": " + where[i]);
  }
  sample.report(specs.size(), differ, specs[0].name());
  return differ;
}

/// Compares the device's codes with core's definition, at and around every boundary and on floats
/// of every size.
template <class F>
int wrong_codes() {
  const auto& tables = []() -> const auto& {
    if constexpr (F::kSigned)
      return cuda::kSignedTables;
    else
      return cuda::kUnsignedTables;
  }();
  int wrong = 0;
  const auto at = [&](float z) { wrong += cuda::Device<F>::quantize(z, tables) != F::quantize(z); };
  for (uint32_t bits = 0; bits <= 0x3f800001u; bits += 997)
    at(bits_float(bits)), at(-bits_float(bits));
  for (int code = 0; code < 256; ++code) {
    wrong += float_bits(cuda::Device<F>::dequantize(static_cast<uint8_t>(code), tables)) !=
             float_bits(F::dequantize(code));
    const float low = F::dequantize(code), high = code < 255 ? F::dequantize(code + 1) : 1.0f;
    for (const double center :
         {(static_cast<double>(low) + high) / 2.0, static_cast<double>(low)}) {
      const uint32_t bits = float_bits(static_cast<float>(center));
      for (uint32_t near = bits - 4; near != bits + 5; ++near) {
        if (magnitude_bits(bits_float(near)) <= 0x3f800001u) at(bits_float(near));
      }
    }
  }
  for (const float z : {0.0f, -0.0f, 1.0f, -1.0f, bits_float(1), bits_float(0x80000001u)}) at(z);
  return wrong;
}

/// Adds a gradient to buffers on both sides. Returns the number of bytes that differ.
int wrong_sums() {
  const cpu::Kernels& kernels = cpu::kernels();
  std::mt19937 random(5);
  int wrong = 0;
  size_t turn = 0;
  struct Part {
    int64_t rows, cols, global_cols, first;
  };
  const Part parts[] = {{1, 4097, 4097, 0}, {1, 1000, 1000, 13},         {5, 37, 90, 90'013},
                        {3, 256, 512, 256}, {7, 3, 3, int64_t{7} << 33}, {1, 5, 5, 3}};
  for (int format = 0; format < param_count(); ++format) {
    const ParamInfo info = param_info(format);
    for (int grad = 0; grad < grad_count(); ++grad) {
      for (const Part& part : parts) {
        if (!sample(turn++, std::size(parts) * static_cast<size_t>(param_count() * grad_count())))
          continue;
        const auto n = static_cast<size_t>(part.rows * part.cols);
        std::vector<uint8_t> g(n * static_cast<size_t>(grad_bytes(grad))), held[2], compensation[2];
        held[0].resize(n * static_cast<size_t>(info.bytes));
        compensation[0].resize(n * static_cast<size_t>(info.compensation_bytes));
        for (auto* bytes : {&g, &held[0], &compensation[0]}) {  // including NaN and infinities
          for (uint8_t& b : *bytes) b = static_cast<uint8_t>(random());
        }
        held[1] = held[0], compensation[1] = compensation[0];
        const auto job = [&](int on) {
          Accumulation made{};
          made.held = held[on].data();
          made.compensation = compensation[on].empty() ? nullptr : compensation[on].data();
          made.grad = g.data();
          made.format = format, made.grad_format = grad;
          made.rows = part.rows, made.cols = part.cols;
          made.global_cols = part.global_cols, made.first = part.first;
          made.scale = 1.0f / 3.0f;
          made.random = {7, 3, 11, 0xdeadbeefu};
          return made;
        };
        cpu::accumulate(job(0), 0, job(0).tiles(), kernels);
        const Accumulation one = job(1);
        const CudaAccumulation call{0, nullptr, &one, 1};
        check(lowbit_cuda_accumulate(&call) == nullptr, "lowbit_cuda_accumulate");
        for (size_t i = 0; i < held[0].size(); ++i) wrong += held[0][i] != held[1][i];
        for (size_t i = 0; i < compensation[0].size(); ++i)
          wrong += compensation[0][i] != compensation[1][i];
      }
    }
  }
  return wrong;
}

/// Adds gradients to many buffers in one call, empty ones among them. Returns the number of buffers
/// that differ, and the launches.
struct ManySums {
  int wrong = 0;
  int64_t launches = 0;
};
ManySums many_sums(int count) {
  const cpu::Kernels& kernels = cpu::kernels();
  std::mt19937 random(7);
  std::vector<std::vector<uint16_t>> held[2], grads;
  std::vector<Accumulation> jobs[2];
  for (int i = 0; i < count; ++i) {
    const int64_t rows = i % 5 == 4 ? 0 : 1 + i % 3, cols = i % 7 == 6 ? 0 : 1 + 37 * (i % 11);
    std::vector<uint16_t> values(static_cast<size_t>(rows * cols));
    for (auto* side : {&held[0], &grads}) {
      for (uint16_t& v : values) v = static_cast<uint16_t>(random() & 0xbfff);
      side->push_back(values);
    }
    held[1].push_back(held[0].back());
    for (const int on : {0, 1}) {
      Accumulation job{};
      job.held = held[on].back().data(), job.grad = grads.back().data();
      job.format = find_param("bfloat16_stochastic"), job.grad_format = 1;
      job.rows = rows, job.cols = cols, job.global_cols = cols, job.first = i * rows * cols;
      job.scale = 0.25f;
      job.random = {7, 3, static_cast<uint32_t>(i), 11};
      jobs[on].push_back(job);
    }
  }
  for (const Accumulation& job : jobs[0]) cpu::accumulate(job, 0, job.tiles(), kernels);
  ManySums result;
  const int64_t before = emulator::machine.launches;
  const CudaAccumulation call{0, nullptr, jobs[1].data(), count};
  check(lowbit_cuda_accumulate(&call) == nullptr, "lowbit_cuda_accumulate");
  result.launches = emulator::machine.launches - before;
  for (size_t i = 0; i < held[0].size(); ++i) result.wrong += held[0][i] != held[1][i];
  return result;
}

/// Sums and means of gradients, with and without words, of addends and of other sums. Returns the
/// number of values that differ.
int wrong_means() {
  const cpu::Kernels& kernels = cpu::kernels();
  std::mt19937_64 random(5);
  const auto fill = [&](std::vector<uint8_t>& bytes, int mantissa) {  // narrow exponents, mostly
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
    if (random() % 4 == 0 || mantissa < 0) return;
    for (size_t i = 1; i < bytes.size(); ++i) {
      if (i % static_cast<size_t>(mantissa) == static_cast<size_t>(mantissa) - 1)
        bytes[i] = static_cast<uint8_t>((bytes[i] & 0x80) | 0x3a | (random() & 3));
    }
  };
  int wrong = 0;
  for (const int64_t n : {1, 31, 32, 300}) {
    for (int turn = 0; turn < 24; ++turn) {
      const int format = turn % (grad_count() + 1) - 1, mean_format = turn / 2 % grad_count();
      const bool keeps = turn % 3 == 0, has_words = keeps || turn % 3 == 1;
      const int64_t rows = turn % 5, stride = n + turn % 2 * 3;
      const auto count = static_cast<size_t>(n);
      const int size = format < 0 ? 8 : grad_bytes(format);
      std::vector<uint8_t> addends(static_cast<size_t>(rows * stride * size) + 8);
      std::vector<uint64_t> words[2];
      std::vector<uint8_t> means[2];
      const int width = bin_width(2 * rows + 1);
      words[0].resize(count);
      for (uint64_t& word : words[0]) {
        for (int64_t k = 0; k < rows; ++k)
          word = bin_add(word, bits_float(static_cast<uint32_t>(random()) & 0xbbffffffu), width);
      }
      fill(addends, format < 0 ? -1 : size);
      if (format < 0) {
        for (int64_t k = 0; k < rows * stride; ++k) {
          const float x = bits_float(static_cast<uint32_t>(random()) & 0xbfffffffu);
          reinterpret_cast<uint64_t*>(addends.data())[k] = bin_add(0, x, width);
        }
      }
      means[0].resize(count * static_cast<size_t>(grad_bytes(mean_format)));
      words[1] = words[0], means[1] = means[0];
      const auto sum = [&](int on) {
        MeanSum made{};
        made.words = has_words ? words[on].data() : nullptr;
        made.addends = addends.data(), made.addend_format = format;
        made.mean = keeps ? nullptr : means[on].data(), made.mean_format = mean_format;
        made.width = width, made.rows = rows, made.stride = stride, made.n = n;
        made.divisor = 1 + turn % 7;
        return made;
      };
      cpu::add_means(sum(0), 0, n, kernels);
      const MeanSum one = sum(1);
      const CudaMeans call{0, nullptr, &one, 1};
      check(lowbit_cuda_means(&call) == nullptr, "lowbit_cuda_means");
      for (size_t i = 0; i < count; ++i) wrong += words[0][i] != words[1][i];
      for (size_t i = 0; i < means[0].size(); ++i) wrong += means[0][i] != means[1][i];
    }
  }
  return wrong;
}

}  // namespace
}  // namespace lowbit
