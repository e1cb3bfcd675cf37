#include "ops_plan.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ops_scratch.h"

namespace lowbit {
namespace {

using torch::headeronly::ScalarType;

void check_tensor(const Tensor& t, const char* what, size_t i, ScalarType dtype, int64_t numel,
                  const Device& device, const char* elsewhere = "") {
  STD_TORCH_CHECK(t.scalar_type() == dtype, "lowbit::step: ", what, " of parameter ", i,
                  " has another dtype than its format");
  STD_TORCH_CHECK(t.numel() == numel, "lowbit::step: ", what, " of parameter ", i, " has ",
                  t.numel(), " elements, expected ", numel);
  STD_TORCH_CHECK(t.is_contiguous(), "lowbit::step: ", what, " of parameter ", i,
                  " is not contiguous");
  STD_TORCH_CHECK(device.has(t), "lowbit::step: ", what, " of parameter ", i,
                  " is on another device than the parameter (", Device(t).name(), " and ",
                  device.name(), ")", elsewhere);
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

}  // namespace

int checked_rule(const std::string& name, const std::vector<double>& hyper) {
  const int rule = find_rule(name);
  STD_TORCH_CHECK(rule >= 0, "lowbit::step: no update rule is named '", name,
                  "'; lowbit.catalog() lists them");
  STD_TORCH_CHECK(static_cast<int>(hyper.size()) == rule_info(rule).hypers, "lowbit::step: ", name,
                  " takes ", rule_info(rule).hypers, " hyperparameters, not ", hyper.size());
  return rule;
}

Plan make_plan(const StepArgs& args) {
  const auto& [name, params, grads, state, steps, workspace, plan, hyper, lr, grad_scale, found_inf,
               maximize, seed, phase] = args;
  const int rule = checked_rule(name, hyper);
  const Scratch scratch = checked_scratch(workspace);
  ScratchSize size;
  const size_t n = params.size();
  STD_TORCH_CHECK(grads.size() == n && steps.size() == n, "lowbit::step: ", n, " parameters, ",
                  grads.size(), " gradients, ", steps.size(), " steps");
  const int64_t* row = checked_plan(plan, static_cast<int64_t>(n));
  const RuleInfo info = rule_info(rule);
  Plan made;
  made.rule = rule;
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
    job.random = random_key(static_cast<uint64_t>(seed), 0, static_cast<uint32_t>(row[kStream]));
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
    place(job, info, row, scratch, size);
  }
  STD_TORCH_CHECK(next == state.size(), "lowbit::step: ", state.size(), " state tensors, ", next,
                  " wanted");
  check_scratch(workspace, size, device);
  made.phases = info.rounds + made.measures_scales;
  STD_TORCH_CHECK(phase >= 0 && phase <= made.phases, "lowbit::step: there is no phase ", phase,
                  " of ", name);
  return made;
}

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
  const auto list = size.list();
  return {list.begin(), list.end()};
}

}  // namespace lowbit
