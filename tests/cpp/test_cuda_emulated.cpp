// The CUDA library, launcher and kernels as they are, on the CPU (cuda_emulator.h): parameters,
// codes, scales and steps in all their phases against the CPU walk, byte for byte. Then the same
// with mistakes planted, which must show.
#include "cuda_emulator.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>

#include "catalog.h"
#include "core/exact_sum.h"
#include "core/registry.h"
#include "cpu/gradient.h"
#include "cpu/step.h"

namespace lowbit {
// Where the kernels draw random bits, and the tables that they read, a test can plant a mistake.
inline int random_fault = 0;
inline Random8 faulty_random8(const RandomKey& key, uint64_t group) {
  Random8 r = random8(key, random_fault == 1   ? group + 1
                           : random_fault == 2 ? group & 0xffffffffu
                           : random_fault == 4 ? group & 0xffffffffffffffu
                                               : group);
  if (random_fault == 3) {
    for (uint32_t& word : r.word) word = word << 16 | word >> 16;
  }
  return r;
}
}  // namespace lowbit
#define random8 faulty_random8
#undef LB_TABLE
#define LB_TABLE inline
#include "cuda/step.cu"
#undef random8

namespace lowbit {
namespace {

int passed = 0, failed = 0;

void check(bool ok, const std::string& what) {
  ok ? ++passed : ++failed;
  if (!ok) std::printf("FAILED %s\n", what.c_str());
}

/// 16-byte aligned memory.
struct alignas(16) Piece {
  unsigned char byte[16];
  bool operator==(const Piece&) const = default;
};
using Bytes = std::vector<Piece>;

/// How one slot of state is kept.
struct Keep {
  int format = 0, block = 256, kind = kBlock;
  bool stochastic = false;
};

/// What a parameter looks like and where it lies in the whole.
struct Spec {
  int rule = 0, param = 2, grad = 1;
  Keep state[kMaxSlots] = {{2}, {3}, {3}, {3}};
  int64_t rows = 1, cols = 1, global_cols = 0, first = 0;  // global_cols 0: cols
  std::vector<int64_t> inside{};  // the dimensions that make up cols; none: one
  int misaligned = 0;             // elements by which the parameter's memory is off
  int64_t more_rows = 0;          // of the whole parameter

  std::vector<int64_t> dims() const {
    std::vector<int64_t> all{rows};
    all.insert(all.end(), inside.begin(), inside.end());
    if (inside.empty()) all.push_back(cols);
    return all;
  }
  std::string name() const {
    std::string text =
        std::string(rule_info(rule).name) + " " + param_info(param).name + " " + grad_dtype(grad);
    for (int k = 0; k < rule_info(rule).slots; ++k) {
      const Keep& keep = state[k];
      text += std::string(" ") + state_info(keep.format).name + "/" +
              std::to_string(keep.kind == kBlock ? keep.block : -keep.kind) +
              (keep.stochastic ? "~" : "");
    }
    for (const int64_t d : dims()) text += " " + std::to_string(d);
    return text + " of " + std::to_string(global_cols) + " from " + std::to_string(first);
  }
};

int dtype_bytes(const char* dtype) {
  return std::strcmp(dtype, "float32") == 0 ? 4 : std::strcmp(dtype, "uint8") == 0 ? 1 : 2;
}

/// The memory of one parameter, with margins that must stay as they are.
struct Memory {
  static constexpr size_t kMargin = 4;
  std::vector<Bytes> param, state;  // param: itself, and what is kept beside it
  Bytes grad;
  float step = 0;

  static Bytes buffer(int64_t bytes) {
    return Bytes(static_cast<size_t>(ceil_div(bytes, 16)) + 2 * kMargin);
  }
  static unsigned char* at(Bytes& bytes) { return bytes[kMargin].byte; }
};

/// Values of every magnitude, some exact in few bits, some zero.
float draw(std::mt19937& random, float size) {
  std::normal_distribution<float> normal;
  const unsigned kind = random() % 16;
  const float x = normal(random) * size;
  if (kind == 0) return 0.0f;
  if (kind == 1) return x * 1e-6f;
  if (kind == 2) return std::round(x * 8.0f / size) / 8.0f * size;
  return x;
}

void put(unsigned char* at, const char* dtype, int64_t i, float x) {
  if (dtype_bytes(dtype) == 4) {
    std::memcpy(at + 4 * i, &x, 4);
  } else {
    const uint16_t half =
        std::strcmp(dtype, "float16") == 0 ? half_nearest(x) : bfloat16_nearest(x);
    std::memcpy(at + 2 * i, &half, 2);
  }
}

/// The workspace of a step of several phases, for all jobs: as ops.cpp lays it out.
struct Scratch {
  std::vector<int64_t> totals, rows, cols;
  std::vector<uint32_t> row_most, col_most;
  std::vector<float> floats;
};

/// The measured scales of one slot, as ops.cpp keeps them beside a job.
struct Measured {
  size_t job;
  int slot;
  std::vector<float*> most;
  std::vector<int64_t> dims;
  bool combined() const { return dims.size() > 2; }
};

/// Jobs over memory, with their workspace.
struct Batched {
  std::vector<Job> jobs;
  std::vector<float*> steps;
  std::vector<Measured> measured;
  Scratch scratch;
};

/// A job over the memory of one parameter; makes the memory where there is none yet. Workspace
/// pointers are offsets until `place`.
void add_job(Batched& all, const Spec& spec, Memory& m) {
  const bool fresh = m.param.empty();
  const RuleInfo rule = rule_info(spec.rule);
  const ParamInfo param = param_info(spec.param);
  const int64_t n = spec.rows * spec.cols;
  size_t next = 0;
  const auto take = [&](int64_t bytes) -> unsigned char* {
    if (fresh) m.state.push_back(Memory::buffer(bytes));
    return Memory::at(m.state[next++]);
  };
  if (fresh) {
    m.param.push_back(Memory::buffer(param.bytes * (n + spec.misaligned)));
    m.param.push_back(Memory::buffer(param.extra_bytes * n));
    m.grad = Memory::buffer(4 * n);
  }
  Job job{};
  job.rule = spec.rule, job.param_format = spec.param, job.grad_format = spec.grad;
  job.rows = spec.rows, job.cols = spec.cols;
  job.global_cols = spec.global_cols ? spec.global_cols : spec.cols, job.first = spec.first;
  job.numel = n + spec.more_rows * spec.cols;
  const std::vector<int64_t> dims = spec.dims();
  job.inner_cols = dims.back(), job.inner_rows = dims[dims.size() - 2];
  job.batches = 1;
  for (size_t d = 0; d + 2 < dims.size(); ++d) job.batches *= dims[d];
  job.global_inner_cols = job.inner_cols;
  job.global_inner_rows = job.inner_rows + (dims.size() == 2 ? spec.more_rows : 0);
  job.random = {0x12345678u, 7u, 0, static_cast<uint32_t>(spec.rows * 31 + spec.cols)};
  job.param = Memory::at(m.param[0]) + spec.misaligned * param.bytes;
  job.extra = param.extra_bytes > 0 ? Memory::at(m.param[1]) : nullptr;
  job.grad = Memory::at(m.grad);
  job.tile = kTile;
  Scratch& s = all.scratch;
  const auto room = [](auto& list, int64_t count) {
    const size_t at = list.size();
    list.resize(at + static_cast<size_t>(count));
    // An offset, until all lists have their length.
    return reinterpret_cast<decltype(list.data())>(at * sizeof(list[0]));
  };
  for (int k = 0; k < rule.slots; ++k) {
    const Keep& keep = spec.state[k];
    const StateInfo info = state_info(keep.format);
    StateSlot& slot = job.state[k];
    slot.format = keep.format, slot.kind = info.scaled ? keep.kind : kNoScale;
    slot.block = slot.kind == kBlock ? keep.block : 0;
    slot.stochastic = keep.stochastic;
    slot.values =
        take(info.scaled ? spec.rows * code_bytes(spec.cols, info.bits) : n * info.bits / 8);
    if (slot.kind == kBlock) {
      if (slot.block > job.tile) job.tile = slot.block;
      slot.scales = take(info.scale_bytes * spec.rows * ceil_div(spec.cols, slot.block));
    }
    if (!is_measured(slot.kind)) continue;
    Measured measured{all.jobs.size(), k, {}, {}};
    const auto most = [&](int64_t length) {
      measured.most.push_back(reinterpret_cast<float*>(take(4 * length)));
      return reinterpret_cast<const uint32_t*>(measured.most.back());
    };
    slot.row_stride = slot.kind == kTensor ? 0 : 1;
    const int64_t rows = slot.kind == kTensor ? 1 : spec.rows;
    if (slot.kind != kColumn) slot.row_most = most(rows), slot.row_next = room(s.row_most, rows);
    if (slot.kind == kColumn) slot.col_most = most(spec.cols);
    if (slot.kind == kRank1) {
      measured.dims = dims;
      for (size_t d = 1; d < dims.size(); ++d) slot.col_most = most(dims[d]);
      if (measured.combined())
        slot.col_most = reinterpret_cast<uint32_t*>(room(s.floats, spec.cols));
    }
    if (slot.kind == kColumn || slot.kind == kRank1) slot.col_next = room(s.col_most, spec.cols);
    all.measured.push_back(measured);
  }
  int64_t *row_sums = nullptr, *col_sums = nullptr;
  if (rule.factors > 0) {
    row_sums = room(s.rows, job.batches * job.inner_rows * ExactSum::kWords);
    col_sums = room(s.cols, job.batches * (job.inner_cols + 1) * ExactSum::kWords);
  }
  for (int k = 0; k < rule.factors; ++k) {
    Factor& factor = job.factor[k];
    factor.row = reinterpret_cast<float*>(take(4 * job.batches * job.inner_rows));
    factor.col = reinterpret_cast<float*>(take(4 * job.batches * job.inner_cols));
    factor.scaled = room(s.floats, job.batches * job.inner_rows);
    factor.row_sums = row_sums, factor.col_sums = col_sums;
  }
  if (rule.numbers > 0) job.numbers = reinterpret_cast<float*>(take(4 * rule.numbers));
  job.totals = room(s.totals, rule.rounds * kMaxTotals * ExactSum::kWords);
  all.jobs.push_back(job);
  all.steps.push_back(&m.step);
}

/// Offsets become pointers.
void place(Batched& all) {
  Scratch& s = all.scratch;
  const auto move = [](auto*& at, auto& list) {
    at = reinterpret_cast<std::remove_reference_t<decltype(at)>>(
        reinterpret_cast<char*>(list.data()) + reinterpret_cast<size_t>(at));
  };
  for (Job& job : all.jobs) {
    const RuleInfo rule = rule_info(job.rule);
    move(job.totals, s.totals);
    for (int k = 0; k < rule.factors; ++k) {
      move(job.factor[k].row_sums, s.rows), move(job.factor[k].col_sums, s.cols);
      move(job.factor[k].scaled, s.floats);
    }
  }
  for (const Measured& m : all.measured) {
    StateSlot& slot = all.jobs[m.job].state[m.slot];
    if (slot.kind != kColumn) move(slot.row_next, s.row_most);
    if (slot.kind == kColumn || slot.kind == kRank1) move(slot.col_next, s.col_most);
    if (m.combined()) move(slot.col_most, s.floats);
  }
}

void forget(Scratch& s) {
  for (auto* list : {&s.totals, &s.rows, &s.cols}) std::fill(list->begin(), list->end(), 0);
  for (auto* list : {&s.row_most, &s.col_most}) std::fill(list->begin(), list->end(), 0u);
}

/// A value for a hyperparameter of that name.
double hyper_value(const std::string& name) {
  const std::pair<const char*, double> known[] = {{"lr", 1e-2},
                                                  {"beta1", 0.9},
                                                  {"beta2", 0.99},
                                                  {"beta3", 0.95},
                                                  {"eps", 1e-8},
                                                  {"eps1", 1e-20},
                                                  {"eps2", 1e-3},
                                                  {"d", 1.0},
                                                  {"weight_decay", 1e-2},
                                                  {"beta2_decay", -0.8},
                                                  {"decay_by", 2.0},
                                                  {"relative_step", 0.0},
                                                  {"fira_margin", 0.1},
                                                  {"scale_parameter", 1},
                                                  {"trust_coefficient", 1e-2}};
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

struct Options {
  const float *lr = nullptr, *grad_scale = nullptr, *found_inf = nullptr;
  bool maximize = false;
  float grad_size = 1e-2f;
  bool odd_grads = false;  // NaN, infinities, huge and tiny ones
  double decay = -1.0;     // weight_decay, where it is not to be the rule's
  double rate = -1.0;      // lr
  std::vector<double> hyper(int rule) const {
    std::vector<double> values = hyper_of(rule, UpdateRules{});
    if (decay >= 0.0) values[4] = decay;
    if (rate >= 0.0) values[0] = rate;
    return values;
  }
};

int phases_of(const Batched& all) {
  return rule_info(all.jobs[0].rule).rounds + (all.measured.empty() ? 0 : 1);
}

/// Of each column, the least maximum over the dimensions after the first.
void combine(const Measured& m, int64_t cols, uint32_t* out) {
  for (int64_t c = 0; c < cols; ++c) {
    out[c] = ~0u;
    int64_t inner = cols;
    for (size_t d = 1; d < m.dims.size(); ++d) {
      inner /= m.dims[d];
      const auto* bits = reinterpret_cast<const uint32_t*>(m.most[d]);
      out[c] = std::min(out[c], bits[c / inner % m.dims[d]]);
    }
  }
}

/// A phase as ops.cpp runs it on the CPU.
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
      if (r == phase - 1 && rule.grid_factor[r] >= 0) settle_factor(job, r);
      settle(job, r, phase == phases);
    }
  }
  for (const Measured& m : all.measured) {
    if (m.combined())
      combine(m, jobs[m.job].cols, const_cast<uint32_t*>(jobs[m.job].state[m.slot].col_most));
  }
  const cpu::Leaves& leaves = cpu::leaves();
  if (phase < rule.rounds) {
    const int k = rule.grid_factor[phase];
    if (k >= 0) {
      std::fill(all.scratch.rows.begin(), all.scratch.rows.end(), 0);
      std::fill(all.scratch.cols.begin(), all.scratch.cols.end(), 0);
    }
    for (const Job& job : jobs) {
      for (int64_t b = 0; k >= 0 && b < job.batches; ++b) {
        const int64_t last = b * (job.inner_cols + 1) + job.inner_cols;
        for (int64_t r = 0; r < job.inner_rows; ++r)
          exact_add(job.factor[k].row[b * job.inner_rows + r],
                    job.factor[k].col_sums + last * ExactSum::kWords);
      }
      cpu::measure(job, phase, 0, cpu::measure_parts(job), leaves);
      int64_t* total = job.totals + (phase * kMaxTotals + kGridTotal) * ExactSum::kWords;
      for (int64_t c = 0; k >= 0 && job.batches == 1 && c < job.inner_cols; ++c) {
        exact_merge(job.factor[k].col_sums + c * ExactSum::kWords, total);
        exact_carry(total);
      }
    }
    return;
  }
  if (phase < phases) {
    for (const Job& job : jobs) {
      if (job.measures_scales(rule.slots))
        cpu::measure_scales(job, 0, cpu::measure_parts(job), leaves);
    }
    return;
  }
  for (const Measured& m : all.measured) {
    if (!m.combined()) continue;
    const Job& job = jobs[m.job];
    int64_t inner = job.cols;
    for (size_t d = 1; d < m.dims.size(); ++d) {
      auto* bits = reinterpret_cast<uint32_t*>(m.most[d]);
      std::fill_n(bits, m.dims[d], 0u);
      inner /= m.dims[d];
      for (int64_t c = 0; c < job.cols; ++c) {
        uint32_t& b = bits[c / inner % m.dims[d]];
        const uint32_t most = job.state[m.slot].col_next[c];
        b = std::max(b, most > kInfinityBits ? kCanonicalNan : most);
      }
    }
    combine(m, job.cols, job.state[m.slot].col_next);
  }
  for (const Job& job : jobs) {
    if (job.tiles() > 0) cpu::step(job, 0, job.tiles(), leaves);
  }
  for (const Measured& m : all.measured) {
    const StateSlot& slot = jobs[m.job].state[m.slot];
    const auto keep = [](float* to, const uint32_t* from, int64_t n) {
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = from[i] > kInfinityBits ? kCanonicalNan : from[i];
        std::memcpy(to + i, &bits, 4);
      }
    };
    if (slot.row_next) keep(m.most[0], slot.row_next, slot.row_stride ? jobs[m.job].rows : 1);
    if (slot.col_next && !m.combined()) keep(m.most.back(), slot.col_next, jobs[m.job].cols);
  }
}

void step_cuda(Batched& all, const Options& o, int phase) {
  Bytes workspace(
      static_cast<size_t>(lowbit_cuda_workspace(static_cast<int64_t>(all.jobs.size()))) / 16 + 1);
  std::memset(workspace.data(), 0xff, workspace.size() * sizeof(Piece));
  std::vector<CudaScale> scales;
  for (const Measured& m : all.measured) {
    const Job& job = all.jobs[m.job];
    const StateSlot& slot = job.state[m.slot];
    CudaScale s{};
    for (size_t d = 0; d < m.most.size(); ++d) s.most[d] = m.most[d];
    s.count = static_cast<int>(m.dims.size());
    for (size_t d = 0; d < m.dims.size(); ++d) s.dims[d] = m.dims[d];
    if (m.combined()) s.col_most = const_cast<uint32_t*>(slot.col_most);
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
  call.workspace = workspace.data();
  const char* error = lowbit_cuda_step(&call);
  check(error == nullptr, std::string("lowbit_cuda_step: ") + (error ? error : ""));
}

/// Where the two differ, or an empty string.
std::string difference(const Memory& a, const Memory& b) {
  if (a.param[0] != b.param[0]) return "parameter";
  if (a.param[1] != b.param[1]) return "what is beside the parameter";
  for (size_t k = 0; k < a.state.size(); ++k) {
    if (a.state[k] != b.state[k]) return "state tensor " + std::to_string(k);
  }
  return float_bits(a.step) != float_bits(b.step) ? "step" : "";
}

/// How often each kernel served a job.
int served[cuda::kFastCount + 1];

/// Steps all specs, which share a rule, `steps` times on both, each phase one call; the number of
/// specs that differ.
int compare(const std::vector<Spec>& specs, const Options& options, int steps, bool report = true) {
  std::mt19937 random(5);
  std::vector<Memory> memory[2];
  Batched all[2];
  memory[0].resize(specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    add_job(all[0], specs[i], memory[0][i]);
    for (int64_t e = 0; e < specs[i].rows * specs[i].cols; ++e)
      put(static_cast<unsigned char*>(all[0].jobs[i].param), param_info(specs[i].param).dtype, e,
          draw(random, 1.0f));
  }
  memory[1] = memory[0];
  for (size_t i = 0; i < specs.size(); ++i) add_job(all[1], specs[i], memory[1][i]);
  all[0] = {};
  for (size_t i = 0; i < specs.size(); ++i) add_job(all[0], specs[i], memory[0][i]);
  for (Batched& b : all) place(b);
  for (const Job& job : all[1].jobs) ++served[cuda::kernel_of(job)];
  std::vector<std::string> where(specs.size());
  for (int s = 0; s < steps; ++s) {
    for (size_t i = 0; i < specs.size(); ++i) {
      for (int64_t e = 0; e < specs[i].rows * specs[i].cols; ++e) {
        float g = draw(random, options.grad_size);
        if (options.odd_grads && e % 701 == 5 * s) {
          const float odd[] = {
              NAN, INFINITY, -INFINITY, 3e38f, 1e-42f, -1e-30f, bits_float(0xffc12345u)};
          g = odd[random() % 7];
        }
        for (int on : {0, 1}) put(Memory::at(memory[on][i].grad), grad_dtype(specs[i].grad), e, g);
      }
    }
    for (Batched& b : all) forget(b.scratch);
    for (int phase = 0; phase <= phases_of(all[0]); ++phase) {
      step_cpu(all[0], options, phase);
      step_cuda(all[1], options, phase);
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
  return differ;
}

/// One shape of two to four dimensions, even or uneven, and after three more the next.
Spec shaped(Spec spec, int turn) {
  switch (turn % 4) {
    case 0:
      spec.rows = 2, spec.cols = 264;
      break;
    case 1:
      spec.rows = 3, spec.cols = 77, spec.more_rows = 2, spec.global_cols = 100, spec.first = 1003;
      break;
    case 2:
      spec.rows = 4, spec.cols = 90, spec.inside = {6, 5, 3};
      break;
    default:
      spec.rows = 3, spec.cols = 330, spec.inside = {6, 55};
  }
  return spec;
}

/// Every state format with every scale and rounding, in the first slot of the rule that fits its
/// sign.
void test_every_format() {
  std::vector<Spec> block, measured;
  const int lengths[] = {32, 64, 128, 256, 512, 1024, 2048};
  for (int f = 0; f < state_count(); ++f) {
    const StateInfo info = state_info(f);
    for (int kind = info.scaled ? kBlock : kNoScale; kind <= (info.measurable ? kRank1
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
          (is_measured(kind) ? measured : block).push_back(shaped(spec, turn));
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

/// Every rule with every parameter format, gradient and several ways to keep its state.
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
    compare(specs, {}, 3);
    Options odd;
    odd.odd_grads = true;
    compare(specs, odd, 2);
  }
}

std::vector<Spec> shapes(int param, int grad, int s0, int s1) {
  std::vector<Spec> specs;
  const auto add = [&](int64_t rows, int64_t cols, int64_t global_cols, int64_t first,
                       int block0 = 256, int block1 = 256, int misaligned = 0) {
    Spec spec;
    spec.param = param, spec.grad = grad;
    spec.state[0] = {s0, block0}, spec.state[1] = {s1, block1};
    spec.rows = rows, spec.cols = cols, spec.global_cols = global_cols, spec.first = first;
    spec.misaligned = misaligned;
    specs.push_back(spec);
  };
  add(20, 896, 0, 0);
  add(4, 1408, 0, 896 * 512);         // a later shard
  add(3, 4096, 0, int64_t{1} << 36);  // indices beyond 32 bits
  add(2, 8, 0, 0), add(5, 16, 0, 80), add(3, 248, 0, 0);
  add(40, 77, 0, 0), add(5, 77, 0, 3 * 77), add(40, 1, 0, 0), add(1, 1, 0, 0);
  add(0, 512, 0, 0), add(5, 0, 0, 0);  // empty shards
  add(6, 257, 0, 257 * 2), add(4, 255, 0, 0);
  add(3, 512, 1024, 512), add(3, 300, 900, 300);                  // cut along the columns
  add(2, 512, 1021, 5), add(3, 264, 1021, 8), add(3, 264, 0, 4);  // Philox groups that no lane owns
  add(4, 512, 0, 0, 256, 256, 1);                                 // unaligned memory
  for (int block = 32; block <= 256; block *= 2) {
    add(2, 616, 0, 0, block, 256), add(2, 616, 0, 0, 256, block),
        add(1, 333, 0, 0, block, 8192 / block);
  }
  for (int block = 512; block <= 2048; block *= 2) {
    add(2, 4616, 0, 0, block, 256), add(2, 2500, 0, 0, 64, block), add(1, 3333, 0, 0, block, 512);
  }
  return specs;
}

/// What a user has: 8-bit state on bfloat16 and float32 parameters; the fixed kernels and, where
/// rows are uneven, the general one.
void test_shapes() {
  const int d8 = find_state("dynamic8"), d8u = find_state("dynamic8_unsigned"),
            wide = find_state("float32");
  Options odd;
  odd.odd_grads = true;
  for (const cuda::Fast& f : cuda::kFast) {
    check(f.rule >= 0 && f.param >= 0 && f.grad >= 0 && f.state[0] >= 0 && f.state[1] >= 0,
          "a fixed kernel's formats are registered");
    std::vector<Spec> specs = shapes(f.param, f.grad, f.state[0], f.state[1]);
    if (&f != cuda::kFast && f.state[0] == d8)
      specs.erase(
          std::remove_if(specs.begin(), specs.end(), [](const Spec& s) { return s.cols % 8 != 0; }),
          specs.end());
    compare(specs, odd, 3);
  }
  for (int i = 0; i <= cuda::kFastCount; ++i)
    check(served[i] >= 5, "kernel " + std::to_string(i) + " was tested");

  std::vector<Spec> mixed;  // more than one prepare, every kernel in one call, empty ones between
  for (int i = 0; i < 1100; ++i) {
    Spec spec;
    spec.param = i % 3, spec.grad = i % 2;
    spec.state[0] = {i % 5 == 0 ? wide : d8}, spec.state[1] = {i % 5 == 0 ? wide : d8u};
    spec.rows = i % 7 == 0 ? 0 : 1 + i % 2, spec.cols = 8 + 24 * (i % 13) + i % 5 / 4;
    mixed.push_back(spec);
  }
  compare(mixed, {}, 2);
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
  }
  const auto run = [&](Memory& m, const Options& options) {
    Batched all;
    add_job(all, specs[0], m);
    place(all);
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

/// Codes by the device's arithmetic against core's definition, at and beside every boundary and on
/// floats all over.
template <class F>
int wrong_codes() {
  const auto& tables = []() -> const auto& {
    if constexpr (F::kSigned)
      return cuda::kSignedTables;
    else
      return cuda::kUnsignedTables;
  }();
  int wrong = 0;
  const auto at = [&](float z) { wrong += cuda::Device<F>::encode(z, tables) != F::encode(z); };
  for (uint32_t bits = 0; bits <= 0x3f800001u; bits += 997)
    at(bits_float(bits)), at(-bits_float(bits));
  for (int code = 0; code < 256; ++code) {
    wrong += float_bits(cuda::Device<F>::decode(static_cast<uint8_t>(code), tables)) !=
             float_bits(F::decode(code));
    const float low = F::decode(code), high = code < 255 ? F::decode(code + 1) : 1.0f;
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

/// The encode and decode kernels against the CPU's leaves: every code under scales of all kinds,
/// blocks of all lengths, uneven rows.
void test_codes() {
  check(wrong_codes<Dynamic8>() == 0, "dynamic8: codes on the device");
  check(wrong_codes<Dynamic8Unsigned>() == 0, "dynamic8_unsigned: codes on the device");
  const cpu::Leaves& leaves = cpu::leaves();
  std::mt19937 random(3);
  for (int format = 0; format < state_count(); ++format) {
    const StateInfo info = state_info(format);
    if (!info.scaled) continue;
    for (int block = 32; block <= 2048; block *= 2) {
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
      check(lowbit_cuda_encode(&call) == nullptr, "lowbit_cuda_encode");
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
        leaves.encode[format](&x[value], &codes[0][code], &scale[0][stored], block, n, nullptr,
                              nullptr);
      });
      const std::string name = std::string(info.name) + ", blocks of " + std::to_string(block);
      check(codes[0] == codes[1], "encode " + name);
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
      check(lowbit_cuda_decode(&call) == nullptr, "lowbit_cuda_decode");
      tiles([&](size_t value, size_t code, size_t stored, int n) {
        leaves.decode[format](&codes[0][code], &scale[0][stored], block, &back[0][value], n);
      });
      bool same = true;
      for (size_t i = 0; i < x.size(); ++i)
        same &= float_bits(canonical(back[0][i])) == float_bits(canonical(back[1][i]));
      check(same, "decode " + name);
    }
  }
}

/// A small run that mistakes must disturb; 0 where nothing differs.
int probe() {
  std::vector<Spec> specs = shapes(2, 1, find_state("dynamic8"), find_state("dynamic8_unsigned"));
  specs.resize(9);
  int wrong = compare(specs, {}, 2, false);
  std::vector<Spec> coarse;  // few bits, by chance, long blocks, measured scales
  for (int turn = 0; turn < 4; ++turn) {
    Spec spec = shaped({}, turn);
    spec.param = find_param("bfloat16_split8");
    spec.state[0] = {find_state("dynamic4"), 0, kRank1, true};
    spec.state[1] = {find_state("linear4_unsigned"), 128, kBlock, turn % 2 == 0};
    coarse.push_back(spec);
  }
  Spec wide;
  wide.rows = 1, wide.cols = 2500;
  wide.state[0] = {find_state("dynamic8"), 2048}, wide.state[1] = {find_state("log8"), 1024};
  coarse.push_back(wide);
  wrong += compare(coarse, {}, 2, false);
  std::vector<Spec> factored;  // sums of rows, columns and the tensor
  for (int turn = 0; turn < 4; ++turn) {
    Spec spec = shaped({}, turn);
    spec.rule = find_rule("adafactor_momentum");
    factored.push_back(spec);
  }
  wrong += compare(factored, {}, 2, false);
  return wrong + wrong_codes<Dynamic8>() + wrong_codes<Dynamic8Unsigned>();
}

/// Runs the probe with a mistake in another process, which may crash; whether it showed.
bool shows(const std::function<void()>& mistake) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(0);
    mistake();
    _exit(probe() == 0 ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/// Bytes of buffers that differ from the CPU walk's after a gradient was added to each.
int wrong_sums() {
  const cpu::Leaves& leaves = cpu::leaves();
  std::mt19937 random(5);
  int wrong = 0;
  struct Place {
    int64_t rows, cols, global_cols, first;
  };
  const Place places[] = {{1, 4097, 4097, 0}, {1, 1000, 1000, 13},         {5, 37, 90, 90'013},
                          {3, 256, 512, 256}, {7, 3, 3, int64_t{7} << 33}, {1, 5, 5, 3}};
  for (int format = 0; format < param_count(); ++format) {
    const ParamInfo info = param_info(format);
    for (int grad = 0; grad < grad_count(); ++grad) {
      for (const Place& place : places) {
        const auto n = static_cast<size_t>(place.rows * place.cols);
        std::vector<uint8_t> g(n * static_cast<size_t>(grad_bytes(grad))), held[2], beside[2];
        held[0].resize(n * static_cast<size_t>(info.bytes));
        beside[0].resize(n * static_cast<size_t>(info.extra_bytes));
        for (auto* bytes : {&g, &held[0], &beside[0]}) {  // NaN and infinities among them
          for (uint8_t& b : *bytes) b = static_cast<uint8_t>(random());
        }
        held[1] = held[0], beside[1] = beside[0];
        const auto job = [&](int on) {
          Accumulation made{};
          made.held = held[on].data();
          made.beside = beside[on].empty() ? nullptr : beside[on].data();
          made.grad = g.data();
          made.format = format, made.grad_format = grad;
          made.rows = place.rows, made.cols = place.cols;
          made.global_cols = place.global_cols, made.first = place.first;
          made.scale = 1.0f / 3.0f;
          made.random = {7, 3, 11, 0xdeadbeefu};
          return made;
        };
        cpu::accumulate(job(0), 0, job(0).tiles(), leaves);
        const CudaAccumulation call{0, nullptr, job(1)};
        check(lowbit_cuda_accumulate(&call) == nullptr, "lowbit_cuda_accumulate");
        for (size_t i = 0; i < held[0].size(); ++i) wrong += held[0][i] != held[1][i];
        for (size_t i = 0; i < beside[0].size(); ++i) wrong += beside[0][i] != beside[1][i];
      }
    }
  }
  return wrong;
}

void test_accumulate() {
  check(wrong_sums() == 0, "gradients added on the device");
  for (const int fault : {1, 3, 4}) {
    random_fault = fault;
    check(wrong_sums() > 0, "other random bits show in added gradients");
    random_fault = 0;
  }
}

void test_mistakes_show() {
  emulator::Faults& faults = emulator::machine.faults;
  check(!shows([] {}), "no mistake, no difference");
  check(shows([&] { faults.short_shuffle = true; }), "a shuffle over half the lanes shows");
  check(shows([&] { faults.no_block_barrier = true; }), "a missing block barrier shows");
  check(shows([&] { faults.no_warp_barrier = true; }), "a missing warp barrier shows");
  check(shows([&] { faults.lost_atomics = true; }), "an addition that is lost shows");
  check(shows([&] { faults.lost_maxima = true; }), "a maximum that is lost shows");
  check(shows([] { random_fault = 4; }), "state rounded with the parameter's bits shows");
  check(shows([] { random_fault = 1; }), "the next group's random bits show");
  check(shows([] { random_fault = 2; }), "a counter of 32 bits shows");
  check(shows([] { random_fault = 3; }), "swapped halves of random words show");
  check(shows([] {
          cuda::kSignedTables.from[200] = std::nextafter(cuda::kSignedTables.from[200], 2.0f);
        }),
        "a boundary one unit high shows");
  check(shows([] { cuda::kUnsignedTables.from[1] = 2e-7f; }),
        "a positive value rounded to zero shows");
  check(shows([] { cuda::kSignedTables.lines[14].slope *= 1.1f; }), "a wrong slope shows");
  check(shows([] { cuda::kUnsignedTables.value[77] *= 1.0000002f; }), "a value one unit off shows");
  const auto& d4 = cuda::kShapes.at[find_state("dynamic4")];
  const auto& l4 = cuda::kShapes.at[find_state("linear4_unsigned")];
  check(shows([&] { cuda::kBooks.value[d4.offset + 9] *= 1.05f; }),
        "a codebook's value one part in twenty off shows");
  check(shows([&] { cuda::kBooks.boundary[l4.offset + 5] *= 1.01f; }),
        "a codebook's boundary one part in a hundred high shows");
  check(shows([] { cuda::kShapes.at[find_state("log8")].scale_bytes = 4; }),
        "scales of another length show");
}

}  // namespace
}  // namespace lowbit

int main(int argc, char** argv) {
  const std::pair<const char*, void (*)()> tests[] = {
      {"codes", lowbit::test_codes},           {"every_format", lowbit::test_every_format},
      {"every_rule", lowbit::test_every_rule}, {"shapes", lowbit::test_shapes},
      {"options", lowbit::test_options},       {"accumulate", lowbit::test_accumulate},
      {"mistakes", lowbit::test_mistakes_show}};
  for (const auto& [name, test] : tests) {
    if (argc < 2 || std::strcmp(argv[1], name) == 0) test();
  }
  std::printf("%d passed, %d failed\n", lowbit::passed, lowbit::failed);
  return lowbit::failed ? 1 : 0;
}
