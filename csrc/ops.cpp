// Reception: the schemas, their checks, and dispatch to a processor. With the other files of
// operators the only C++ that includes torch, through the LibTorch stable ABI, so one binary serves
// torch 2.11 and later.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "core/bits.h"
#include "core/exact_sum.h"
#include "cpu/step.h"
#include "cuda/library.h"
#include "ops.h"

namespace lowbit {
namespace {

using torch::headeronly::ScalarType;

// Columns of a plan row; lowbit/layout.py writes them.
enum PlanColumn {
  kRows,
  kCols,
  kGlobalCols,
  kFirst,
  kStream,
  kParamFormat,
  kNumel,
  kBatches,
  kInnerRows,
  kInnerCols,
  kGlobalInnerRows,
  kGlobalInnerCols,
  kSlot,  // kSlotColumns for each slot
  kDims = kSlot + 4 * kMaxSlots,
  kMostDims = 6,
  kFront = kDims + 1 + kMostDims,
  kBack,
  kCut,
  kPlanColumns
};
enum SlotColumn { kSlotFormat, kSlotBlock, kSlotKind, kSlotStochastic, kSlotColumns };

/// Where the tensors of a step are.
struct Device {
  bool cpu;
  int32_t index;
  explicit Device(const Tensor& t) : cpu(t.is_cpu()), index(t.get_device_index()) {}
  bool has(const Tensor& t) const {
    return t.is_cpu() == cpu && (cpu || t.get_device_index() == index);
  }
};

void check_tensor(const Tensor& t, const char* what, size_t i, ScalarType dtype, int64_t numel,
                  const Device& device, const char* elsewhere = "") {
  STD_TORCH_CHECK(t.scalar_type() == dtype, "lowbit::step: ", what, " of parameter ", i,
                  " has another dtype than its format");
  STD_TORCH_CHECK(t.numel() == numel, "lowbit::step: ", what, " of parameter ", i, " has ",
                  t.numel(), " elements, expected ", numel);
  STD_TORCH_CHECK(t.is_contiguous(), "lowbit::step: ", what, " of parameter ", i,
                  " is not contiguous");
  STD_TORCH_CHECK(device.has(t), "lowbit::step: ", what, " of parameter ", i,
                  " is on another device than the parameter", elsewhere);
}

/// Elements of the tensor beside the parameter for each of its values: two bytes make 16 bits.
int extra_width(const ParamInfo& info) {
  return std::strcmp(info.extra_dtype, "uint8") == 0 ? info.extra_bytes : 1;
}

/// Brings what the tensor knows of itself into the caches.
void touch(const Tensor& t) {
  const void* p = t.const_data_ptr();
  asm volatile("" ::"r"(p));
}

/// The rows of a plan for n parameters.
const int64_t* checked_plan(const Tensor& plan, int64_t n) {
  STD_TORCH_CHECK(plan.scalar_type() == ScalarType::Long && plan.is_cpu() && plan.is_contiguous() &&
                      plan.dim() == 2 && plan.size(0) == n && plan.size(1) == kPlanColumns,
                  "lowbit::step: plan must be an int64 CPU tensor [", n, ", ",
                  static_cast<int>(kPlanColumns), "]");
  return plan.const_data_ptr<int64_t>();
}

/// What several phases of one step share: workspace that holds nothing between steps.
struct Scratch {
  int64_t *totals = nullptr, *rows = nullptr, *cols = nullptr;
  uint32_t *row_most = nullptr, *col_most = nullptr, *blocks = nullptr;
  float* floats = nullptr;
};

/// Lengths of the workspace's parts.
struct ScratchSize {
  int64_t totals = 0, rows = 0, cols = 0, row_most = 0, col_most = 0, blocks = 0, floats = 0;
};

bool combines(const int64_t* row) { return row[kDims] > 2; }  // columns of several dimensions

/// Gives a job its part of the workspace, and counts it.
void place(Job& job, const RuleInfo& rule, const int64_t* row, const Scratch& s, ScratchSize& at) {
  const auto of = [](auto* base, int64_t offset) { return base ? base + offset : base; };
  job.totals = of(s.totals, at.totals);
  at.totals += rule.rounds * kMaxTotals * ExactSum::kWords;
  for (int k = 0; k < rule.factors; ++k) {  // one at a time is measured
    Factor& factor = job.factor[k];
    factor.row_sums = of(s.rows, at.rows);
    factor.col_sums = of(s.cols, at.cols);
    factor.scaled = of(s.floats, at.floats);
    at.floats += job.batches * job.inner_rows;
  }
  if (rule.factors > 0) {
    at.rows += job.batches * job.inner_rows * ExactSum::kWords;
    at.cols += job.batches * (job.inner_cols + 1) * ExactSum::kWords;
  }
  for (int k = 0; k < rule.slots; ++k) {
    StateSlot& slot = job.state[k];
    if (slot.kind == kBlock && job.cut != kNoCut) {
      slot.block_next = of(s.blocks, at.blocks);
      at.blocks += 2 * job.cut_rows() * job.blocks(slot.block);
    }
    if (!is_measured(slot.kind)) continue;
    const bool rows = slot.kind != kColumn, cols = slot.kind == kColumn || slot.kind == kRank1;
    slot.row_stride = slot.kind == kTensor ? 0 : 1;
    if (rows) {
      slot.row_next = of(s.row_most, at.row_most);
      at.row_most += slot.kind == kTensor ? 1 : job.rows;
    }
    if (cols) {
      slot.col_next = of(s.col_most, at.col_most);
      at.col_most += job.cols;
      if (slot.kind == kRank1 && combines(row)) {
        slot.col_most = reinterpret_cast<uint32_t*>(of(s.floats, at.floats));
        at.floats += job.cols;
      }
    }
  }
}

/// The measured scales of one slot as state keeps them.
struct SlotState {
  std::vector<float*> most;  // one tensor for each kind but rank 1, which has one a dimension
};

struct Plan {
  std::vector<Job> jobs;
  std::vector<SlotState> states;  // kMaxSlots for each job
  ScratchSize size;
  bool measures_scales = false;
};

/// Rows and sizes of a job, from its row of the plan.
void read_shape(Job& job, const int64_t* row, size_t i) {
  job.rows = row[kRows], job.cols = row[kCols], job.global_cols = row[kGlobalCols];
  job.first = row[kFirst], job.numel = row[kNumel];
  job.batches = row[kBatches], job.inner_rows = row[kInnerRows], job.inner_cols = row[kInnerCols];
  job.global_inner_rows = row[kGlobalInnerRows], job.global_inner_cols = row[kGlobalInnerCols];
  job.front = row[kFront], job.back = row[kBack], job.cut = static_cast<int>(row[kCut]);
  STD_TORCH_CHECK(job.rows >= 0 && job.cols >= 0 && job.first >= 0 && job.global_cols >= job.cols &&
                      job.batches >= 0 && job.inner_rows >= 0 && job.inner_cols >= 0 &&
                      row[kDims] >= 0 && row[kDims] <= kMostDims && job.front >= 0 &&
                      job.back >= 0 && row[kCut] >= 0 && row[kCut] < kCuts &&
                      (job.front + job.back == 0 || job.front + job.back < job.rows * job.cols) &&
                      job.front <= job.cols && job.back <= job.cols,
                  "lowbit::step: the plan of parameter ", i, " has a negative or impossible size");
}

/// Format, scale and rounding of one slot, from the plan.
StateSlot read_slot(const int64_t* row, int k, size_t i) {
  const int64_t* at = row + kSlot + k * kSlotColumns;
  const int64_t format = at[kSlotFormat], block = at[kSlotBlock], kind = at[kSlotKind];
  STD_TORCH_CHECK(format >= 0 && format < state_count(), "lowbit::step: slot ", k, " of parameter ",
                  i, " has no format ", format);
  const StateInfo info = state_info(static_cast<int>(format));
  STD_TORCH_CHECK(kind >= 0 && kind < kScaleKinds && info.scaled == (kind != kNoScale) &&
                      (info.measurable || !is_measured(static_cast<int>(kind))),
                  "lowbit::step: slot ", k, " of parameter ", i, " has a scale of kind ", kind,
                  ", which ", info.name, " cannot have");
  STD_TORCH_CHECK(kind == kBlock
                      ? block >= kLeastBlock && block <= kMostBlock && (block & (block - 1)) == 0
                      : block == 0,
                  "lowbit::step: slot ", k, " of parameter ", i, " has a block length of ", block,
                  "; it must be a power of two from ", kLeastBlock, " to ", kMostBlock,
                  " where blocks have scales and 0 where not");
  StateSlot slot{};
  slot.format = static_cast<int>(format);
  slot.block = static_cast<int>(block);
  slot.kind = static_cast<int>(kind);
  slot.stochastic = at[kSlotStochastic] != 0;
  return slot;
}

/// All slots, and the length of a tile, which holds whole blocks of each.
void read_slots(Job& job, const RuleInfo& rule, const int64_t* row, size_t i) {
  job.tile = kTile;
  for (int k = 0; k < rule.slots; ++k) {
    job.state[k] = read_slot(row, k, i);
    job.tile = std::max(job.tile, job.state[k].block);
  }
}

/// The jobs of a step, every tensor held against the plan. State comes, for each parameter, as:
/// what the parameter format keeps beside it; for each slot its values and its scales (one tensor,
/// or one for each dimension where they are of rank 1); for each factored moment rows and columns;
/// the rule's numbers.
Plan make_plan(int rule, const Tensors& params, const Tensors& grads, const Tensors& state,
               const Tensors& steps, const Tensor& plan, int64_t seed, const Scratch& scratch) {
  const size_t n = params.size();
  STD_TORCH_CHECK(grads.size() == n && steps.size() == n, "lowbit::step: ", n, " parameters, ",
                  grads.size(), " gradients, ", steps.size(), " steps");
  const int64_t* row = checked_plan(plan, static_cast<int64_t>(n));
  const RuleInfo info = rule_info(rule);
  Plan made;
  made.jobs.resize(n);
  made.states.resize(n * kMaxSlots);
  size_t next = 0, warm = 0;
  const Device device(params[0]);
  const char* elsewhere = device.cpu ? "" : "; state on the host takes state_memory='pinned'";
  for (size_t i = 0; i < n; ++i, row += kPlanColumns) {
    // What tensors know of themselves may have left the caches since the last step. Asked of many in
    // a row it arrives side by side; below, one after another.
    constexpr size_t kAhead = 16;
    if (i % kAhead == 0) {
      for (size_t j = i; j < std::min(i + kAhead, n); ++j)
        touch(params[j]), touch(grads[j]), touch(steps[j]);
      const size_t until = std::min(next + kAhead * (state.size() / n + 1), state.size());
      for (; warm < until; ++warm) touch(state[warm]);
    }
    Job& job = made.jobs[i];
    job = Job{};
    const auto take = [&](const char* what, ScalarType dtype, int64_t numel) -> void* {
      STD_TORCH_CHECK(next < state.size(),
                      "lowbit::step: the list of state tensors ends at parameter ", i);
      const Tensor& t = state[next++];
      check_tensor(t, what, i, dtype, numel, device, elsewhere);
      return t.mutable_data_ptr();
    };
    job.rule = rule;
    read_shape(job, row, i);
    job.random = {static_cast<uint32_t>(seed),
                  static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32), 0,
                  static_cast<uint32_t>(row[kStream])};
    job.param_format = static_cast<int>(row[kParamFormat]);
    STD_TORCH_CHECK(job.param_format >= 0 && job.param_format < param_count(),
                    "lowbit::step: parameter ", i, " has no format ", job.param_format);
    const ParamInfo param = param_info(job.param_format);
    const int64_t room = job.rows * job.cols, numel = room - job.front - job.back;
    check_tensor(params[i], "the value", i, scalar_type(param.dtype), numel, device);
    job.grad_format = grad_format(grads[i]);
    STD_TORCH_CHECK(job.grad_format >= 0, "lowbit::step: the gradient of parameter ", i,
                    " must be float32, bfloat16 or float16");
    check_tensor(grads[i], "the gradient", i, grads[i].scalar_type(), numel, device);
    STD_TORCH_CHECK(steps[i].scalar_type() == ScalarType::Float && steps[i].numel() == 1,
                    "lowbit::step: the step of parameter ", i, " must be one float32");
    job.param = params[i].mutable_data_ptr();
    job.grad = grads[i].const_data_ptr();
    if (param.extra_dtype[0] != 0)
      job.extra = take("what is kept beside the value", scalar_type(param.extra_dtype),
                       room * extra_width(param));
    read_slots(job, info, row, i);
    for (int k = 0; k < info.slots; ++k) {
      StateSlot& slot = job.state[k];
      const StateInfo format = state_info(slot.format);
      slot.values = take("the state", scalar_type(format.dtype),
                         format.scaled ? job.rows * code_bytes(job.cols, format.bits) : room);
      std::vector<float*>& most = made.states[i * kMaxSlots + k].most;
      const auto take_most = [&](int64_t length) {
        most.push_back(static_cast<float*>(take("the scale", ScalarType::Float, length)));
        return reinterpret_cast<const uint32_t*>(most.back());
      };
      if (slot.kind == kBlock) {
        slot.scales = take("the scale", scalar_type(format.scale_dtype),
                           job.rows * job.blocks(slot.block) * format.scale_numbers);
      } else if (slot.kind == kRow) {
        slot.row_most = take_most(job.rows);
      } else if (slot.kind == kTensor) {
        slot.row_most = take_most(1);
      } else if (slot.kind == kColumn) {
        slot.col_most = take_most(job.cols);
      } else if (slot.kind == kRank1) {
        slot.row_most = take_most(job.rows);
        for (int64_t d = 1; d < row[kDims]; ++d) slot.col_most = take_most(row[kDims + 1 + d]);
      }
      made.measures_scales |= is_measured(slot.kind) || (slot.kind == kBlock && job.cut != kNoCut);
      STD_TORCH_CHECK(job.cut != kCutAll || job.lead() * format.bits % 8 == 0,
                      "lowbit::step: the columns of parameter ", i,
                      " are cut inside a byte of codes");
    }
    for (int k = 0; k < info.factors; ++k) {
      job.factor[k].row = static_cast<float*>(
          take("the row factor", ScalarType::Float, job.batches * job.inner_rows));
      job.factor[k].col = static_cast<float*>(
          take("the column factor", ScalarType::Float, job.batches * job.inner_cols));
    }
    if (info.numbers > 0)
      job.numbers = static_cast<float*>(take("the number", ScalarType::Float, info.numbers));
    place(job, info, row, scratch, made.size);
  }
  STD_TORCH_CHECK(next == state.size(), "lowbit::step: ", state.size(), " state tensors, ", next,
                  " wanted");
  return made;
}

/// The one number in a CPU tensor.
double number(const Tensor& t, const char* what) {
  STD_TORCH_CHECK(t.is_cpu() && t.numel() == 1, "lowbit::step: ", what,
                  " must be a CPU tensor of one element here");
  if (t.scalar_type() == ScalarType::Double) return *t.const_data_ptr<double>();
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, "lowbit::step: ", what,
                  " must be float32 or float64");
  return *t.const_data_ptr<float>();
}

int checked_rule(const std::string& name, const std::vector<double>& hyper) {
  const int rule = find_rule(name);
  STD_TORCH_CHECK(rule >= 0, "lowbit::step: no update rule is named '", name,
                  "'; lowbit.catalog() lists them");
  STD_TORCH_CHECK(static_cast<int>(hyper.size()) == rule_info(rule).hypers, "lowbit::step: ", name,
                  " takes ", rule_info(rule).hypers, " hyperparameters, not ", hyper.size());
  return rule;
}

/// In parallel over the parts of all jobs: fn(job, begin, end).
template <class Count, class Fn>
void for_parts(std::vector<Job>& jobs, int64_t grain, const Count& count, const Fn& fn) {
  std::vector<int64_t> ends(jobs.size());  // running sum of parts
  int64_t parts = 0;
  for (size_t i = 0; i < jobs.size(); ++i) ends[i] = parts += count(jobs[i]);
  torch::stable::parallel_for(0, parts, grain, [&](int64_t begin, int64_t end) {
    size_t i =
        static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (int64_t at = begin; at < end; at = ends[i++]) {
      if (at == ends[i]) continue;
      const int64_t start = i > 0 ? ends[i - 1] : 0;
      fn(jobs[i], at - start, std::min(end, ends[i]) - start);
    }
  });
}

/// The maxima of a scale of rank 1 over all columns: of each column, the least over its dimensions
/// after the first.
void combine(const std::vector<float*>& most, const int64_t* dims, int64_t count, uint32_t* out) {
  int64_t cols = 1;
  for (int64_t d = 1; d < count; ++d) cols *= dims[d];
  int64_t inner = cols;
  for (int64_t d = 1; d < count; ++d) {
    const auto* bits = reinterpret_cast<const uint32_t*>(most[static_cast<size_t>(d)]);
    inner /= dims[d];
    for (int64_t c = 0; c < cols; ++c) {
      const uint32_t b = bits[c / inner % dims[d]];
      out[c] = d == 1 || b < out[c] ? b : out[c];
    }
  }
}

/// Keeps the maxima that were measured, and makes them the scales that codes are written with; the
/// codes that are still to be read keep `read` as theirs.
void keep_scales(Job& job, int k, SlotState& state, const int64_t* row) {
  StateSlot& slot = job.state[k];
  if (slot.kind != kRank1 || !combines(row)) return;
  for (int64_t d = 1; d < row[kDims]; ++d)
    std::memset(state.most[static_cast<size_t>(d)], 0,
                static_cast<size_t>(row[kDims + 1 + d]) * sizeof(float));
  int64_t inner = job.cols;
  for (int64_t d = 1; d < row[kDims]; ++d) {
    auto* bits = reinterpret_cast<uint32_t*>(state.most[static_cast<size_t>(d)]);
    inner /= row[kDims + 1 + d];
    for (int64_t c = 0; c < job.cols; ++c) {
      uint32_t& b = bits[c / inner % row[kDims + 1 + d]];
      b = std::max(b, slot.col_next[c] > kInfinityBits ? kCanonicalNan : slot.col_next[c]);
    }
  }
  combine(state.most, row + kDims + 1, row[kDims], slot.col_next);
}

/// After the step: the scales of the codes that were written are the state's.
void write_scales(const Job& job, int k, const SlotState& state, const int64_t* row) {
  const StateSlot& slot = job.state[k];
  const auto copy = [](float* to, const uint32_t* from, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
      reinterpret_cast<uint32_t*>(to)[i] = from[i] > kInfinityBits ? kCanonicalNan : from[i];
  };
  if (slot.row_next != nullptr)
    copy(state.most[0], slot.row_next, slot.kind == kTensor ? 1 : job.rows);
  if (slot.col_next != nullptr && !(slot.kind == kRank1 && combines(row)))
    copy(state.most.back(), slot.col_next, job.cols);
}

/// Adds the old row means to the sum behind each batch's columns. A row of the job that begins
/// elsewhere counts there.
void add_old_rows(const Job& job, const Factor& factor) {
  const int64_t skipped = job.front > 0 && job.inner_cols > 0 ? job.cols / job.inner_cols : 0;
  for (int64_t b = 0; b < job.batches; ++b) {
    int64_t* bins =
        factor.col_sums + (b * (job.inner_cols + 1) + job.inner_cols) * ExactSum::kWords;
    const int64_t begin = std::max(b * job.inner_rows, skipped), end = (b + 1) * job.inner_rows;
    if (begin < end) exact_add(factor.row + begin, static_cast<int>(end - begin), bins);
  }
}

/// The sum over a matrix that may be cut in both directions: over its columns here, then over
/// shards.
void add_grid_total(const Job& job, int round, const Factor& factor) {
  if (job.batches != 1) return;
  int64_t* total = job.totals + (round * kMaxTotals + kGridTotal) * ExactSum::kWords;
  for (int64_t c = 0; c < job.inner_cols; ++c) {
    exact_merge(factor.col_sums + c * ExactSum::kWords, total);
    exact_carry(total);
  }
}

/// One phase on the CPU: a measuring pass, or the update behind the last of them.
void run_phase(Plan& plan, const Tensor& rows, int phase) {
  std::vector<Job>& jobs = plan.jobs;
  const RuleInfo rule = rule_info(jobs[0].rule);
  const int64_t* row = rows.const_data_ptr<int64_t>();
  const cpu::Leaves& leaves = cpu::leaves();
  const auto each_slot = [&](const auto& fn) {
    for (size_t i = 0; i < jobs.size(); ++i) {
      for (int k = 0; k < rule.slots; ++k)
        if (is_measured(jobs[i].state[k].kind))
          fn(jobs[i], k, plan.states[i * kMaxSlots + k], row + i * kPlanColumns);
    }
  };
  each_slot([](Job& job, int k, SlotState& state, const int64_t* at) {
    if (job.state[k].kind == kRank1 && combines(at))
      combine(state.most, at + kDims + 1, at[kDims], const_cast<uint32_t*>(job.state[k].col_most));
  });
  if (phase < rule.rounds) {
    const int k = rule.grid_factor[phase];
    for (Job& job : jobs) {
      if (k >= 0) add_old_rows(job, job.factor[k]);
    }
    const auto parts = [&](const Job& job) { return cpu::measure_parts(job, phase); };
    for_parts(jobs, 1, parts, [&](const Job& job, int64_t begin, int64_t end) {
      cpu::measure(job, phase, begin, end, leaves);
    });
    for (Job& job : jobs) {
      if (k >= 0) add_grid_total(job, phase, job.factor[k]);
    }
  } else if (plan.measures_scales && phase == rule.rounds) {
    for_parts(jobs, 1, cpu::scale_parts, [&](const Job& job, int64_t begin, int64_t end) {
      cpu::measure_scales(job, begin, end, leaves);
    });
  } else {
    each_slot(keep_scales);
    constexpr int64_t kGrain = 32;  // tiles, of 512 values where rows are long: 20 microseconds
    for (Job& job : jobs) cpu::lengthen_tiles(job);
    for_parts(
        jobs, kGrain, [](const Job& job) { return job.tiles(); },
        [&](const Job& job, int64_t begin, int64_t end) {
          if (end == job.tiles() && &job != &jobs.back()) cpu::fetch_first_tile(*(&job + 1));
          cpu::step(job, begin, end, leaves);
        });
    each_slot(write_scales);
    for (const Job& job : jobs) cpu::write_cut_scales(job, leaves);
  }
}

/// The workspace's parts, checked.
Scratch checked_scratch(const Tensors& tensors) {
  Scratch s;
  if (tensors.empty()) return s;
  STD_TORCH_CHECK(tensors.size() == 7,
                  "lowbit::step: scratch has seven tensors, as lowbit::scratch makes them");
  s.totals = static_cast<int64_t*>(tensors[0].mutable_data_ptr());
  s.rows = static_cast<int64_t*>(tensors[1].mutable_data_ptr());
  s.cols = static_cast<int64_t*>(tensors[2].mutable_data_ptr());
  s.row_most = static_cast<uint32_t*>(tensors[3].mutable_data_ptr());
  s.col_most = static_cast<uint32_t*>(tensors[4].mutable_data_ptr());
  s.blocks = static_cast<uint32_t*>(tensors[5].mutable_data_ptr());
  s.floats = static_cast<float*>(tensors[6].mutable_data_ptr());
  return s;
}

void check_scratch_size(const Tensors& tensors, const ScratchSize& size) {
  const int64_t want[] = {size.totals,   size.rows,   size.cols,  size.row_most,
                          size.col_most, size.blocks, size.floats};
  const ScalarType dtype[] = {ScalarType::Long, ScalarType::Long, ScalarType::Long, ScalarType::Int,
                              ScalarType::Int,  ScalarType::Int,  ScalarType::Float};
  int64_t all = 0;
  for (const int64_t w : want) all += w;
  STD_TORCH_CHECK(!tensors.empty() || all == 0,
                  "lowbit::step: this rule or scale is measured before the update and needs the "
                  "workspace that lowbit::scratch makes");
  for (size_t i = 0; i < tensors.size(); ++i) {
    STD_TORCH_CHECK(tensors[i].scalar_type() == dtype[i] && tensors[i].numel() >= want[i] &&
                        tensors[i].is_contiguous(),
                    "lowbit::step: scratch tensor ", i, " has ", tensors[i].numel(),
                    " elements, expected ", want[i]);
  }
}

/// Sizes of the workspace tensors of a step: int64 sums of tensors, rows and columns, int32 maxima
/// of rows, columns and cut blocks, float32.
std::vector<int64_t> scratch_sizes(std::string name, Tensor plan) {
  const int rule = find_rule(name);
  STD_TORCH_CHECK(rule >= 0, "lowbit::scratch_sizes: no update rule is named '", name, "'");
  const RuleInfo info = rule_info(rule);
  const int64_t* row = checked_plan(plan, plan.size(0));
  ScratchSize size;
  for (int64_t i = 0; i < plan.size(0); ++i, row += kPlanColumns) {
    Job job{};
    read_shape(job, row, static_cast<size_t>(i));
    read_slots(job, info, row, static_cast<size_t>(i));
    place(job, info, row, Scratch{}, size);
  }
  return {size.totals,   size.rows,   size.cols,  size.row_most,
          size.col_most, size.blocks, size.floats};
}

void step_cpu(StepArgs args) {
  auto& [name, params, grads, state, steps, scratch, plan, hyper, lr, grad_scale, found_inf,
         maximize, seed, phase] = args;
  const int rule = checked_rule(name, hyper);
  Plan made = make_plan(rule, params, grads, state, steps, plan, seed, checked_scratch(scratch));
  check_scratch_size(scratch, made.size);
  const RuleInfo info = rule_info(rule);
  const int phases = info.rounds + made.measures_scales;  // before the update
  STD_TORCH_CHECK(phase >= 0 && phase <= phases, "lowbit::step: there is no phase ", phase, " of ",
                  name);
  if (found_inf && number(*found_inf, "found_inf") != 0.0) return;
  if (lr) hyper[0] = number(*lr, "lr");
  const double g_scale =
      (maximize ? -1.0 : 1.0) / (grad_scale ? number(*grad_scale, "grad_scale") : 1.0);
  const int rounds = static_cast<int>(phase) < info.rounds ? static_cast<int>(phase) : info.rounds;
  for (size_t i = 0; i < made.jobs.size(); ++i) {
    Job& job = made.jobs[i];
    STD_TORCH_CHECK(steps[i].is_cpu(), "lowbit::step: the step of parameter ", i,
                    " must be on the CPU, as the parameter is");
    float* step = static_cast<float*>(steps[i].mutable_data_ptr());
    if (phase == 0) *step += 1.0f;
    const int64_t t = std::llrint(*step);
    prepare(job, hyper.data(), t, g_scale);
    job.random.step = static_cast<uint32_t>(t);
    job.write_param = hyper[0] != 0.0;
    for (int r = 0; r < rounds; ++r) {
      if (r == phase - 1 && info.grid_factor[r] >= 0) settle_factor(job, r);
      settle(job, r, phase == phases);
    }
  }
  if (phase < info.rounds && info.grid_factor[phase] >= 0) {
    for (const int k : {1, 2})
      std::memset(scratch[static_cast<size_t>(k)].mutable_data_ptr(), 0,
                  static_cast<size_t>(scratch[static_cast<size_t>(k)].numel()) * sizeof(int64_t));
  }
  run_phase(made, plan, static_cast<int>(phase));
}

/// The measured scales of all jobs, as the CUDA library takes them.
std::vector<CudaScale> cuda_scales(const Plan& plan, const Tensor& rows, int slots) {
  static_assert(CudaScale::kMostDims >= kMostDims);
  std::vector<CudaScale> all;
  const int64_t* row = rows.const_data_ptr<int64_t>();
  for (size_t i = 0; i < plan.jobs.size(); ++i, row += kPlanColumns) {
    for (int k = 0; k < slots; ++k) {
      const StateSlot& slot = plan.jobs[i].state[k];
      if (!is_measured(slot.kind)) continue;
      const std::vector<float*>& most = plan.states[i * kMaxSlots + static_cast<size_t>(k)].most;
      CudaScale scale{};
      std::copy(most.begin(), most.end(), scale.most);
      if (slot.kind == kRank1) {
        scale.count = static_cast<int>(row[kDims]);
        std::copy_n(row + kDims + 1, scale.count, scale.dims);
        if (combines(row)) scale.col_most = const_cast<uint32_t*>(slot.col_most);
      }
      scale.row_next = slot.row_next, scale.col_next = slot.col_next;
      scale.rows = slot.kind == kTensor ? 1 : plan.jobs[i].rows;
      scale.cols = plan.jobs[i].cols;
      all.push_back(scale);
    }
  }
  return all;
}

void step_cuda(StepArgs args) {
  auto& [name, params, grads, state, steps, scratch, plan, hyper, lr, grad_scale, found_inf,
         maximize, seed, phase] = args;
  const int rule = checked_rule(name, hyper);
  Plan made = make_plan(rule, params, grads, state, steps, plan, seed, checked_scratch(scratch));
  std::vector<Job>& jobs = made.jobs;
  check_scratch_size(scratch, made.size);
  const RuleInfo info = rule_info(rule);
  const int phases = info.rounds + made.measures_scales;  // before the update
  STD_TORCH_CHECK(phase >= 0 && phase <= phases, "lowbit::step: there is no phase ", phase, " of ",
                  name);
  const cuda::Library& library = cuda::library();
  STD_TORCH_CHECK(library.error == nullptr, "lowbit::step on CUDA: ", library.error);
  CudaStep call{};
  if (lr && lr->is_cpu()) {
    hyper[0] = number(*lr, "lr");
    lr.reset();
  }
  const auto device_float = [](const MaybeTensor& t, const char* what) -> const float* {
    if (!t) return nullptr;
    STD_TORCH_CHECK(t->is_cuda() && t->numel() == 1 && t->scalar_type() == ScalarType::Float,
                    "lowbit::step: ", what, " must be one float32 on the parameters' device");
    return t->const_data_ptr<float>();
  };
  std::vector<float*> step_pointers(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    STD_TORCH_CHECK(steps[i].is_cuda(), "lowbit::step: the step of parameter ", i,
                    " must be on the parameter's device");
    step_pointers[i] = static_cast<float*>(steps[i].mutable_data_ptr());
  }
  const std::vector<CudaScale> scales = cuda_scales(made, plan, info.slots);
  call.device = params[0].get_device_index();
  torch::stable::accelerator::DeviceGuard guard(call.device);
  const Tensor workspace = torch::stable::new_empty(
      params[0], {library.workspace(jobs.data(), static_cast<int64_t>(jobs.size()))},
      ScalarType::Byte);
  call.stream = library.current_stream(call.device);
  call.jobs = jobs.data();
  call.count = static_cast<int64_t>(jobs.size());
  call.phase = static_cast<int>(phase);
  call.phases = phases;
  call.steps = step_pointers.data();
  call.hyper = hyper.data();
  call.hypers = static_cast<int>(hyper.size());
  call.lr = device_float(lr, "lr");
  call.grad_scale = device_float(grad_scale, "grad_scale");
  call.found_inf = device_float(found_inf, "found_inf");
  call.maximize = maximize;
  call.scales = scales.data();
  call.scale_count = static_cast<int64_t>(scales.size());
  for (int i = 0; i < 2 && !scratch.empty(); ++i) {
    const Tensor& sums = scratch[static_cast<size_t>(i) + 1];
    call.sums[i] = sums.mutable_data_ptr();
    call.sums_bytes[i] = sums.numel() * static_cast<int64_t>(sizeof(int64_t));
  }
  call.workspace = workspace.data_ptr();
  const char* error = phase == 0 ? library.prefetch(call.device, call.stream) : nullptr;
  if (error == nullptr) error = library.step(&call);
  STD_TORCH_CHECK(error == nullptr, "lowbit::step on CUDA: ", error);
}

}  // namespace

void step(StepArgs args) {
  if (args.params.empty()) {
    checked_rule(args.rule, args.hyper);
  } else if (args.params[0].is_cuda()) {
    step_cuda(std::move(args));
  } else {
    step_cpu(std::move(args));
  }
}

namespace {

void step_boxed(std::string rule, Tensors params, Tensors grads, Tensors state, Tensors steps,
                Tensors scratch, Tensor plan, std::vector<double> hyper, MaybeTensor lr,
                MaybeTensor grad_scale, MaybeTensor found_inf, bool maximize, int64_t seed,
                int64_t phase) {
  step({rule, params, grads, state, steps, scratch, plan, hyper, lr, grad_scale, found_inf,
        maximize, seed, phase});
}

// ---- codes without a step ----

/// The format of that name; the rest of the shape checks follow from it.
int coded_format(const char* op, const std::string& name) {
  const int format = find_state(name);
  STD_TORCH_CHECK(format >= 0, op, ": no state format is named '", name,
                  "'; lowbit.catalog() lists them");
  STD_TORCH_CHECK(state_info(format).scaled, op, ": '", name, "' has no codes and scales");
  return format;
}

void check_block(const char* op, int64_t block) {
  STD_TORCH_CHECK(block >= kLeastBlock && block <= kMostBlock && (block & (block - 1)) == 0, op,
                  ": block must be a power of two from ", kLeastBlock, " to ", kMostBlock, ", not ",
                  block);
}

void check_matrix(const char* op, const char* what, const Tensor& t, ScalarType dtype, int64_t rows,
                  int64_t cols) {
  STD_TORCH_CHECK(t.dim() == 2 && t.scalar_type() == dtype && t.is_contiguous() &&
                      (rows < 0 || t.size(0) == rows) && (cols < 0 || t.size(1) == cols),
                  op, ": ", what, " must be a contiguous matrix [", rows < 0 ? t.size(0) : rows,
                  ", ", cols < 0 ? t.size(1) : cols, "] of the format's dtype");
}

/// One row after another, tile by tile, in parallel over rows.
template <class Leaf>
void for_tiles(int64_t rows, int64_t cols, int64_t tile, const Leaf& leaf) {
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(cols, 1)),
                              [&](int64_t begin, int64_t end) {
                                for (int64_t row = begin; row < end; ++row) {
                                  for (int64_t col = 0; col < cols; col += tile)
                                    leaf(row, col,
                                         static_cast<int>(std::min<int64_t>(tile, cols - col)));
                                }
                              });
}

void code_cuda(CudaCode call, const Tensor& on, bool encode) {
  const cuda::Library& library = cuda::library();
  STD_TORCH_CHECK(library.error == nullptr, "lowbit on CUDA: ", library.error);
  call.device = on.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(call.device);
  call.stream = library.current_stream(call.device);
  const char* error = (encode ? library.encode : library.decode)(&call);
  STD_TORCH_CHECK(error == nullptr, "lowbit on CUDA: ", error);
}

std::tuple<Tensor, Tensor> encode(Tensor x, std::string name, int64_t block) {
  const char* op = "lowbit::encode";
  const int format = coded_format(op, name);
  const StateInfo info = state_info(format);
  check_block(op, block);
  check_matrix(op, "x", x, ScalarType::Float, -1, -1);
  const int64_t rows = x.size(0), cols = x.size(1), blocks = ceil_div(cols, block);
  const int64_t row_bytes = code_bytes(cols, info.bits), scale_bytes = blocks * info.scale_bytes;
  Tensor codes =
      torch::stable::new_empty(x, {rows, code_bytes(cols, info.bits)}, scalar_type(info.dtype));
  Tensor scales = torch::stable::new_empty(x, {rows, blocks * info.scale_numbers},
                                           scalar_type(info.scale_dtype));
  auto* values = static_cast<float*>(x.data_ptr());
  auto* code = static_cast<char*>(codes.data_ptr());
  auto* scale = static_cast<char*>(scales.data_ptr());
  if (x.is_cuda()) {
    code_cuda({0, nullptr, format, static_cast<int>(block), rows, cols, values, code, scale}, x,
              true);
  } else {
    const cpu::Leaves& leaves = cpu::leaves();
    for_tiles(rows, cols, std::max<int64_t>(kTile, block), [&](int64_t row, int64_t col, int n) {
      cpu::encode_run(leaves, format, values + row * cols + col,
                      code + row * row_bytes + code_bytes(col, info.bits),
                      scale + row * scale_bytes + col / block * info.scale_bytes,
                      static_cast<int>(block), n);
    });
  }
  return {codes, scales};
}

Tensor decode(Tensor codes, Tensor scales, std::string name, int64_t block, int64_t cols) {
  const char* op = "lowbit::decode";
  const int format = coded_format(op, name);
  const StateInfo info = state_info(format);
  check_block(op, block);
  const int64_t blocks = ceil_div(cols, block);
  check_matrix(op, "codes", codes, scalar_type(info.dtype), -1, code_bytes(cols, info.bits));
  const int64_t rows = codes.size(0);
  check_matrix(op, "scales", scales, scalar_type(info.scale_dtype), rows,
               blocks * info.scale_numbers);
  STD_TORCH_CHECK(scales.is_cpu() == codes.is_cpu(), op, ": codes and scales are on two devices");
  const int64_t row_bytes = code_bytes(cols, info.bits), scale_bytes = blocks * info.scale_bytes;
  Tensor x = torch::stable::new_empty(codes, {rows, cols}, ScalarType::Float);
  auto* values = static_cast<float*>(x.data_ptr());
  auto* code = static_cast<char*>(codes.data_ptr());
  auto* scale = static_cast<char*>(scales.data_ptr());
  if (codes.is_cuda()) {
    code_cuda({0, nullptr, format, static_cast<int>(block), rows, cols, values, code, scale}, codes,
              false);
  } else {
    const auto leaf = cpu::leaves().decode[format];
    for_tiles(rows, cols, std::max<int64_t>(kTile, block), [&](int64_t row, int64_t col, int n) {
      leaf(code + row * row_bytes + code_bytes(col, info.bits),
           scale + row * scale_bytes + col / block * info.scale_bytes, static_cast<int>(block),
           values + row * cols + col, n);
    });
  }
  return x;
}

/// With a scale of its own for each value, on the CPU: for loading and looking, not for steps.
int given_format(const char* op, const std::string& name) {
  const int format = coded_format(op, name);
  STD_TORCH_CHECK(state_info(format).measurable, op, ": '", name,
                  "' needs more than the largest magnitude for a scale");
  return format;
}

Tensor encode_given(Tensor x, Tensor most, std::string name) {
  const char* op = "lowbit::encode_given";
  const int format = given_format(op, name);
  const StateInfo info = state_info(format);
  check_matrix(op, "x", x, ScalarType::Float, -1, -1);
  const int64_t rows = x.size(0), cols = x.size(1), row_bytes = code_bytes(cols, info.bits);
  check_matrix(op, "most", most, ScalarType::Float, rows, cols);
  Tensor codes =
      torch::stable::new_empty(x, {rows, code_bytes(cols, info.bits)}, scalar_type(info.dtype));
  const auto* values = static_cast<const float*>(x.const_data_ptr());
  const auto* bits = static_cast<const uint32_t*>(most.const_data_ptr());
  auto* code = static_cast<char*>(codes.data_ptr());
  const auto leaf = cpu::leaves().encode_given[format];
  for_tiles(rows, cols, kTile, [&](int64_t row, int64_t col, int n) {
    leaf(values + row * cols + col, code + row * row_bytes + code_bytes(col, info.bits),
         bits + row * cols + col, n, nullptr);
  });
  return codes;
}

Tensor decode_given(Tensor codes, Tensor most, std::string name) {
  const char* op = "lowbit::decode_given";
  const int format = given_format(op, name);
  const StateInfo info = state_info(format);
  check_matrix(op, "most", most, ScalarType::Float, -1, -1);
  const int64_t rows = most.size(0), cols = most.size(1), row_bytes = code_bytes(cols, info.bits);
  check_matrix(op, "codes", codes, scalar_type(info.dtype), rows, code_bytes(cols, info.bits));
  Tensor x = torch::stable::new_empty(most, {rows, cols}, ScalarType::Float);
  auto* values = static_cast<float*>(x.data_ptr());
  const auto* bits = static_cast<const uint32_t*>(most.const_data_ptr());
  const auto* code = static_cast<const char*>(codes.const_data_ptr());
  const auto leaf = cpu::leaves().decode_given[format];
  for_tiles(rows, cols, kTile, [&](int64_t row, int64_t col, int n) {
    leaf(code + row * row_bytes + code_bytes(col, info.bits), bits + row * cols + col,
         values + row * cols + col, n);
  });
  return x;
}

// ---- parameters without a step ----

int param_format(const char* op, const std::string& name) {
  const int format = find_param(name);
  STD_TORCH_CHECK(format >= 0, op, ": no parameter format is named '", name,
                  "'; lowbit.catalog() lists them");
  return format;
}

/// The float32 values of a parameter and what its format keeps beside it.
Tensor join(Tensor stored, MaybeTensor extra, std::string name) {
  const char* op = "lowbit::join";
  const int format = param_format(op, name);
  const ParamInfo info = param_info(format);
  STD_TORCH_CHECK(stored.scalar_type() == scalar_type(info.dtype) && stored.is_contiguous(), op,
                  ": the parameter must be contiguous ", info.dtype);
  const bool beside = info.extra_bytes > 0;
  STD_TORCH_CHECK(
      !beside || (extra && extra->scalar_type() == scalar_type(info.extra_dtype) &&
                  extra->is_contiguous() && extra->numel() == stored.numel() * extra_width(info)),
      op, ": '", name, "' wants a contiguous ", info.extra_dtype,
      " tensor beside the parameter, of its size");
  Tensor x = torch::stable::new_empty(stored, stored.sizes(), ScalarType::Float);
  const auto* in = static_cast<const char*>(stored.const_data_ptr());
  const auto* more = beside ? static_cast<const char*>(extra->const_data_ptr()) : nullptr;
  auto* out = static_cast<float*>(x.data_ptr());
  const auto leaf = cpu::leaves().load_param[format];
  for_tiles(1, stored.numel(), kTile, [&](int64_t, int64_t at, int n) {
    leaf(in + at * info.bytes, more ? more + at * info.extra_bytes : nullptr, out + at, n);
  });
  return x;
}

/// The parameter that float32 values are stored as, and what is kept beside it (empty where nothing
/// is). Random bits are those of elements counted from 0.
std::tuple<Tensor, Tensor> split(Tensor x, std::string name, int64_t seed, int64_t stream) {
  const char* op = "lowbit::split";
  const int format = param_format(op, name);
  const ParamInfo info = param_info(format);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.is_contiguous(), op,
                  ": x must be contiguous float32");
  const bool beside = info.extra_bytes > 0;
  Tensor stored = torch::stable::new_empty(x, x.sizes(), scalar_type(info.dtype));
  const int64_t none[] = {0};
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  if (extra_width(info) > 1) sizes.push_back(extra_width(info));
  Tensor extra = beside ? torch::stable::new_empty(x, sizes, scalar_type(info.extra_dtype))
                        : torch::stable::new_empty(x, none, ScalarType::Byte);
  const auto* in = static_cast<const float*>(x.const_data_ptr());
  auto* out = static_cast<char*>(stored.data_ptr());
  auto* more = static_cast<char*>(extra.data_ptr());
  const RandomKey key{static_cast<uint32_t>(seed),
                      static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32), 0,
                      static_cast<uint32_t>(stream)};
  const cpu::Leaves& leaves = cpu::leaves();
  for_tiles(1, x.numel(), kTile, [&](int64_t, int64_t at, int n) {
    uint16_t random16[kTile + 8 * 8];
    leaves.draw({key, static_cast<uint64_t>(at) >> 3, (n + 7) / 8, random16});
    leaves.store_param[format](in + at, out + at * info.bytes,
                               beside ? more + at * info.extra_bytes : nullptr, n, random16);
  });
  return {stored, extra};
}

std::string catalog() {
  const char* refused = cpu::refused_isa();
  STD_TORCH_CHECK(refused == nullptr, "LOWBIT_ISA=", refused == nullptr ? "" : refused,
                  ": this processor runs ", cpu::usable_isas());
  return catalog_json();
}

void set_isa(std::string name) {
  STD_TORCH_CHECK(cpu::set_isa(name.c_str()), "lowbit::set_isa: this processor runs ",
                  cpu::usable_isas(), ", not '", name, "'");
}

}  // namespace
}  // namespace lowbit

STABLE_TORCH_LIBRARY(lowbit, m) {
  m.def(
      "step(str rule, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state, Tensor(c!)[] steps, "
      "Tensor(d!)[] scratch, Tensor plan, float[] hyper, *, "
      "Tensor? lr=None, Tensor? grad_scale=None, Tensor? found_inf=None, bool maximize=False, int "
      "seed=0, int phase=0) -> ()");
  m.def("scratch_sizes(str rule, Tensor plan) -> int[]");
  m.def("encode(Tensor x, str format, int block) -> (Tensor codes, Tensor scales)");
  m.def("decode(Tensor codes, Tensor scales, str format, int block, int cols) -> Tensor");
  m.def("encode_given(Tensor x, Tensor most, str format) -> Tensor");
  m.def("decode_given(Tensor codes, Tensor most, str format) -> Tensor");
  m.def("join(Tensor stored, Tensor? extra, str format) -> Tensor");
  m.def("split(Tensor x, str format, int seed, int stream) -> (Tensor stored, Tensor extra)");
  m.def("catalog() -> str");
  m.def("set_isa(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CPU, m) {
  m.impl("step", TORCH_BOX(&lowbit::step_boxed));
  m.impl("encode", TORCH_BOX(&lowbit::encode));
  m.impl("decode", TORCH_BOX(&lowbit::decode));
  m.impl("encode_given", TORCH_BOX(&lowbit::encode_given));
  m.impl("decode_given", TORCH_BOX(&lowbit::decode_given));
  m.impl("join", TORCH_BOX(&lowbit::join));
  m.impl("split", TORCH_BOX(&lowbit::split));
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CUDA, m) {
  m.impl("step", TORCH_BOX(&lowbit::step_boxed));
  m.impl("encode", TORCH_BOX(&lowbit::encode));
  m.impl("decode", TORCH_BOX(&lowbit::decode));
}

STABLE_TORCH_LIBRARY_IMPL(lowbit, CompositeExplicitAutograd, m) {
  m.impl("catalog", TORCH_BOX(&lowbit::catalog));
  m.impl("set_isa", TORCH_BOX(&lowbit::set_isa));
  m.impl("scratch_sizes", TORCH_BOX(&lowbit::scratch_sizes));
}
