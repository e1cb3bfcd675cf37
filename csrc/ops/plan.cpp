#include "ops/plan.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/pair.h"
#include "ops/workspace.h"

namespace lowbit {
namespace {

using torch::headeronly::ScalarType;

constexpr const char* kOp = "lowbit::step";

struct Wanted {
  const char* what;
  ScalarType dtype;
  int64_t numel;
};

/// Checks a tensor of parameter i. advice: where it is on another device than the parameter.
void check_tensor(const Tensor& t, const Wanted& wanted, size_t i, const Device& device,
                  const char* advice = "") {
  STD_TORCH_CHECK(t.scalar_type() == wanted.dtype, kOp, ": ", wanted.what, " of parameter ", i,
                  " has another dtype than its format");
  STD_TORCH_CHECK(t.numel() == wanted.numel, kOp, ": ", wanted.what, " of parameter ", i, " has ",
                  t.numel(), " elements, expected ", wanted.numel);
  STD_TORCH_CHECK(t.is_contiguous(), kOp, ": ", wanted.what, " of parameter ", i,
                  " is not contiguous");
  STD_TORCH_CHECK(device.has(t), kOp, ": ", wanted.what, " of parameter ", i,
                  " is on another device than the parameter (", Device(t).name(), " and ",
                  device.name(), ")", advice);
}

/// The rows of a plan for n parameters.
const PlanRow* checked_plan(const Tensor& plan, int64_t n) {
  STD_TORCH_CHECK(plan.scalar_type() == ScalarType::Long && plan.is_cpu() && plan.is_contiguous() &&
                      plan.dim() == 2 && plan.size(0) == n && plan.size(1) == kPlanColumns,
                  kOp, ": plan must be an int64 CPU tensor [", n, ", ", kPlanColumns, "]");
  return reinterpret_cast<const PlanRow*>(plan.const_data_ptr<int64_t>());
}

/// Whether the matrices of factored moments are all of the local part.
bool matrices_fit(const Job& job) {
  int64_t rows = 0;
  if (job.rows == 0 || job.cols == 0) return true;
  return job.inner_cols > 0 && job.cols % job.inner_cols == 0 &&
         !__builtin_mul_overflow(job.batches, job.inner_rows, &rows) &&
         rows == job.rows * (job.cols / job.inner_cols);
}

/// Whether the local dimensions, which scales of rank 1 go by, are those of the rows and columns.
bool dims_fit(const Job& job, const PlanRow& row) {
  if (row.dims < 2 || row.dim[0] != job.rows) return false;
  int64_t cols = 1;
  for (int64_t d = 1; d < row.dims; ++d) {
    if (row.dim[d] < 0 || __builtin_mul_overflow(cols, row.dim[d], &cols)) return false;
  }
  return cols == job.cols;
}

/// Rows and sizes of a job, from its row of the plan.
void read_shape(Job& job, const RuleInfo& rule, const PlanRow& row, size_t i) {
  job.rows = row.rows, job.cols = row.cols, job.global_cols = row.global_cols;
  job.first = row.first, job.numel = row.numel;
  job.batches = row.batches, job.inner_rows = row.inner_rows, job.inner_cols = row.inner_cols;
  job.global_inner_rows = row.global_inner_rows, job.global_inner_cols = row.global_inner_cols;
  job.front = row.front, job.back = row.back, job.cut = static_cast<int>(row.cut);
  int64_t numel = 0;
  STD_TORCH_CHECK(job.rows >= 0 && job.cols >= 0 && job.first >= 0 && job.global_cols >= job.cols &&
                      !__builtin_mul_overflow(job.rows, job.cols, &numel) && job.batches >= 0 &&
                      job.inner_rows >= 0 && job.inner_cols >= 0 && row.dims >= 0 &&
                      row.dims <= PlanRow::kMaxDims && job.front >= 0 && job.back >= 0 &&
                      row.cut >= 0 && row.cut < kCuts &&
                      (job.front + job.back == 0 || job.front + job.back < job.rows * job.cols) &&
                      job.front <= job.cols && job.back <= job.cols &&
                      (job.cut != kCutAll || job.global_cols == 0 ||
                       job.first % job.global_cols <= job.global_cols - job.cols) &&
                      (rule.factors == 0 || matrices_fit(job)),
                  kOp, ": the plan of parameter ", i, " has a negative or impossible size");
}

/// Format, scale and rounding of one slot, from the plan.
StateSlot read_slot(const PlanSlot& from, int k, size_t i) {
  STD_TORCH_CHECK(from.format >= 0 && from.format < state_count(), kOp, ": slot ", k,
                  " of parameter ", i, " has no format ", from.format);
  const StateInfo info = state_info(static_cast<int>(from.format));
  STD_TORCH_CHECK(from.scale >= 0 && from.scale < kScaleKinds &&
                      info.scaled == (from.scale != kNoScale) &&
                      (info.cross_tile || !is_cross_tile(static_cast<int>(from.scale))),
                  kOp, ": slot ", k, " of parameter ", i, " has a scale of kind ", from.scale,
                  ", which ", info.name, " cannot have");
  const int64_t block = from.block;
  STD_TORCH_CHECK(from.scale == kBlock
                      ? block >= kMinBlock && block <= kMaxBlock && (block & (block - 1)) == 0
                      : block == 0,
                  kOp, ": slot ", k, " of parameter ", i, " has a block length of ", block,
                  "; it must be a power of two from ", kMinBlock, " to ", kMaxBlock,
                  " where blocks have scales and 0 where not");
  StateSlot slot{};
  slot.format = static_cast<int>(from.format);
  slot.block = static_cast<int>(block);
  slot.kind = static_cast<int>(from.scale);
  slot.stochastic = from.stochastic != 0;
  return slot;
}

/// All slots, and the length of a tile, which holds whole blocks of each.
void read_slots(Job& job, const RuleInfo& rule, const PlanRow& row, size_t i) {
  job.tile = kTile;
  for (int k = 0; k < rule.slots; ++k) {
    job.state[k] = read_slot(row.slot[k], k, i);
    job.tile = std::max(job.tile, job.state[k].block);
  }
}

/// Takes the tensors of state one after another, and gives them to jobs.
class StateReader {
 public:
  StateReader(const Tensors& state, size_t params, Plan& plan)
      : state_(state),
        params_(params),
        plan_(plan),
        advice_(plan.device.cpu ? "" : "; state on the host takes state_memory='pinned'") {}

  /// Brings the tensors of the next `params` parameters into the caches.
  void touch_next(size_t params) {
    const size_t until = std::min(next_ + params * (state_.size() / params_ + 1), state_.size());
    for (; touched_ < until; ++touched_) touch(state_[touched_]);
  }

  /// What parameter i keeps, which is the i-th job.
  void read(const RuleInfo& rule, const PlanRow& row, size_t i) {
    Job& job = plan_.jobs[i];
    const ParamInfo param = param_info(job.param_format);
    if (param.compensation_dtype[0] != 0) {
      job.compensation = take({"the compensation", scalar_type(param.compensation_dtype),
                               job.rows * job.cols * compensation_width(param)},
                              i);
    }
    for (int k = 0; k < rule.slots; ++k) {
      const int bits = read_slot_state(
          job, job.state[k], plan_.states[i * kMaxSlots + static_cast<size_t>(k)], row, i);
      STD_TORCH_CHECK(job.cut != kCutAll || job.lead() * bits % 8 == 0, kOp,
                      ": the columns of parameter ", i, " are cut inside a byte of codes");
    }
    for (int k = 0; k < rule.factors; ++k) {
      job.factor[k].row = floats("the row factor", job.batches * job.inner_rows, i);
      job.factor[k].col = floats("the column factor", job.batches * job.inner_cols, i);
    }
    if (rule.numbers > 0) job.numbers = floats("the number", rule.numbers, i);
  }

  void finish() const {
    STD_TORCH_CHECK(next_ == state_.size(), kOp, ": ", state_.size(), " state tensors, ", next_,
                    " wanted");
  }

 private:
  void* take(const Wanted& wanted, size_t i) {
    STD_TORCH_CHECK(next_ < state_.size(), kOp, ": the list of state tensors ends at parameter ",
                    i);
    const Tensor& t = state_[next_++];
    check_tensor(t, wanted, i, plan_.device, advice_);
    return t.mutable_data_ptr();
  }
  float* floats(const char* what, int64_t numel, size_t i) {
    return static_cast<float*>(take({what, ScalarType::Float, numel}, i));
  }

  /// Values and scales; the bits of a value.
  int read_slot_state(Job& job, StateSlot& slot, SlotState& state, const PlanRow& row, size_t i) {
    const StateInfo format = state_info(slot.format);
    slot.values =
        take({"the state", scalar_type(format.dtype),
              format.scaled ? job.rows * code_bytes(job.cols, format.bits) : job.rows * job.cols},
             i);
    const auto absmax = [&](int64_t length) {
      state.absmax.push_back(floats("the scale", length, i));
      return reinterpret_cast<const uint32_t*>(state.absmax.back());
    };
    if (slot.kind == kBlock) {
      slot.scales = take({"the scale", scalar_type(format.scale_dtype),
                          job.rows * job.blocks(slot.block) * format.scale_numbers},
                         i);
    } else if (slot.kind == kRow) {
      slot.row_absmax = absmax(job.rows);
    } else if (slot.kind == kTensor) {
      slot.row_absmax = absmax(1);
    } else if (slot.kind == kColumn) {
      slot.col_absmax = absmax(job.cols);
    } else if (slot.kind == kRank1) {
      STD_TORCH_CHECK(dims_fit(job, row), kOp, ": the dimensions of parameter ", i,
                      " are not those of its rows and columns");
      state.dims.assign(row.dim, row.dim + row.dims);
      slot.row_absmax = absmax(job.rows);
      for (int64_t d = 1; d < row.dims; ++d) slot.col_absmax = absmax(row.dim[d]);
    }
    plan_.has_cross_tile_scales |=
        is_cross_tile(slot.kind) || (slot.kind == kBlock && job.cut != kNoCut);
    return format.bits;
  }

  const Tensors& state_;
  const size_t params_;
  Plan& plan_;
  const char* advice_;
  size_t next_ = 0, touched_ = 0;
};

/// Elements of parameter and gradient.
int64_t here(const Job& job) { return job.rows * job.cols - job.front - job.back; }

void read_param(Job& job, const RuleInfo& rule, const PlanRow& row, const Tensor& param, size_t i,
                const Device& device) {
  read_shape(job, rule, row, i);
  job.random.stream = static_cast<uint32_t>(row.stream);
  job.param_format = static_cast<int>(row.param_format);
  STD_TORCH_CHECK(row.param_format >= 0 && row.param_format < param_count(), kOp, ": parameter ", i,
                  " has no format ", row.param_format);
  const ScalarType dtype = scalar_type(param_info(job.param_format).dtype);
  check_tensor(param, {"the value", dtype, here(job)}, i, device);
}

void set_pair(Plan& plan, size_t i, void* data, const void* grad_data, int grad_format) {
  Job& job = plan.jobs[i];
  // Kernels are chosen by the alignment of a gradient too.
  const auto low_bits = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16; };
  plan.moved |= data != job.param || grad_format != job.grad_format ||
                low_bits(grad_data) != low_bits(job.grad);
  job.param = data;
  job.grad = plan.grads[i] = grad_data;
  job.grad_format = grad_format;
}

/// Two parameters that share memory, if any do: the jobs of one call are walked at the same time.
std::optional<std::pair<size_t, size_t>> overlapping(const Plan& plan) {
  struct Extent {
    uintptr_t begin, end;
    size_t job;
  };
  std::vector<Extent> extents;
  extents.reserve(plan.jobs.size());
  for (size_t i = 0; i < plan.jobs.size(); ++i) {
    const Job& job = plan.jobs[i];
    const auto begin = reinterpret_cast<uintptr_t>(job.param);
    const auto bytes = static_cast<uintptr_t>(here(job) * param_info(job.param_format).bytes);
    if (bytes > 0) extents.push_back({begin, begin + bytes, i});
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < extents.size(); ++i) {
    if (extents[i].begin < extents[i - 1].end)
      return std::minmax(extents[i - 1].job, extents[i].job);
  }
  return std::nullopt;
}

float* checked_step(const Tensor& step, size_t i, const Device& device) {
  STD_TORCH_CHECK(step.scalar_type() == ScalarType::Float && step.numel() == 1, kOp,
                  ": the step of parameter ", i, " must be one float32");
  STD_TORCH_CHECK(!device.cpu || step.is_cpu(), kOp, ": the step of parameter ", i,
                  " must be on the CPU, as the parameter is");
  STD_TORCH_CHECK(device.has(step), kOp, ": the step of parameter ", i, " is on ",
                  Device(step).name(), " and the parameter is on ", device.name());
  return static_cast<float*>(step.mutable_data_ptr());
}

}  // namespace

int checked_rule(const char* op, int64_t number) {
  return checked_number(op, "update rule", number, rule_count());
}

void check_hyper(const RuleInfo& rule, const std::vector<double>& hyper) {
  STD_TORCH_CHECK(static_cast<int>(hyper.size()) == rule.hypers, kOp, ": ", rule.name, " takes ",
                  rule.hypers, " hyperparameters, not ", hyper.size());
}

Plan make_plan(const StepTensors& tensors) {
  const size_t n = tensors.params.size();
  Plan plan{Device(tensors.params[0])};
  STD_TORCH_CHECK(plan.device.has_memory(), kOp, ": the parameters are on ", plan.device.name(),
                  ", such as meta: there is nothing to update");
  plan.rule = checked_rule(kOp, tensors.rule);
  STD_TORCH_CHECK(tensors.steps.size() == n, kOp, ": ", n, " parameters, ", tensors.steps.size(),
                  " steps");
  const PlanRow* const rows = checked_plan(tensors.plan, static_cast<int64_t>(n));
  const RuleInfo rule = rule_info(plan.rule);
  plan.jobs.resize(n);
  plan.states.resize(n * kMaxSlots);
  plan.steps.resize(n);
  plan.grads.resize(n);
  StateReader state(tensors.state, n, plan);
  for (size_t i = 0; i < n; ++i) {
    touch_ahead(tensors.params, i), touch_ahead(tensors.steps, i);
    if (i % kTouchAhead == 0) state.touch_next(kTouchAhead);
    Job& job = plan.jobs[i];
    job.rule = plan.rule;
    read_param(job, rule, rows[i], tensors.params[i], i, plan.device);
    read_slots(job, rule, rows[i], i);
    state.read(rule, rows[i], i);
    plan.steps[i] = checked_step(tensors.steps[i], i, plan.device);
  }
  state.finish();
  plan.phases = rule.rounds + plan.has_cross_tile_scales;
  return plan;
}

bool bind_table(Plan& plan, const Tensor& table) {
  STD_TORCH_CHECK(table.is_cpu() && table.scalar_type() == ScalarType::Long &&
                      table.is_contiguous() && table.dim() == 2 &&
                      table.size(0) == static_cast<int64_t>(plan.jobs.size()) &&
                      table.size(1) == kPairColumns,
                  kOp, ": the table of addresses must be an int64 CPU tensor [", plan.jobs.size(),
                  ", ", kPairColumns, "]");
  const auto* const rows = reinterpret_cast<const TensorPair*>(table.const_data_ptr<int64_t>());
  bool elsewhere = false;
  for (size_t i = 0; i < plan.jobs.size(); ++i) {
    const int64_t numel = here(plan.jobs[i]);
    STD_TORCH_CHECK(rows[i].numel == numel, kOp, ": row ", i, " of the table of addresses is of ",
                    rows[i].numel, " elements, and its parameter has ", numel);
    STD_TORCH_CHECK(numel == 0 || (rows[i].param != nullptr && rows[i].grad != nullptr), kOp,
                    ": row ", i, " of the table of addresses has no address");
    STD_TORCH_CHECK(rows[i].checksum == checksum_of(rows[i]), kOp, ": row ", i,
                    " of the table of addresses is not as lowbit._tensors wrote it");
    elsewhere |= rows[i].param != plan.jobs[i].param;
    set_pair(plan, i, const_cast<void*>(rows[i].param), rows[i].grad, plan.jobs[i].grad_format);
  }
  if (elsewhere) plan.overlaps = overlapping(plan).has_value();
  return !plan.overlaps;
}

bool bind_pairs(Plan& plan, const Tensors& params, const Tensors& grads) {
  bool elsewhere = false;
  for (size_t i = 0; i < grads.size(); ++i) {
    touch_ahead(params, i), touch_ahead(grads, i);
    const Tensor &param = params[i], &grad = grads[i];
    const Job& job = plan.jobs[i];
    const int64_t numel = here(job);
    const int format = grad_format(grad);
    if (format < 0 || !param.is_contiguous() || !grad.is_contiguous() || param.numel() != numel ||
        grad.numel() != numel ||
        param.scalar_type() != scalar_type(param_info(job.param_format).dtype) ||
        !plan.device.has(param) || !plan.device.has(grad))
      return false;
    void* const data = param.mutable_data_ptr();
    elsewhere |= data != job.param;
    set_pair(plan, i, data, grad.const_data_ptr(), format);
  }
  if (elsewhere) plan.overlaps = overlapping(plan).has_value();
  return !plan.overlaps;
}

void bind_tensors(Plan& plan, const Tensors& params, const Tensors& grads) {
  STD_TORCH_CHECK(grads.size() == params.size(), kOp, ": ", params.size(), " parameters, ",
                  grads.size(), " gradients");
  for (size_t i = 0; i < grads.size(); ++i) {
    touch_ahead(grads, i);
    const int format = grad_format(grads[i]);
    STD_TORCH_CHECK(format >= 0, kOp, ": the gradient of parameter ", i,
                    " must be float32, bfloat16 or float16");
    check_tensor(grads[i], {"the gradient", grads[i].scalar_type(), here(plan.jobs[i])}, i,
                 plan.device);
    set_pair(plan, i, params[i].mutable_data_ptr(), grads[i].const_data_ptr(), format);
  }
  const std::optional<std::pair<size_t, size_t>> both = overlapping(plan);
  STD_TORCH_CHECK(!both, kOp, ": parameters ", both->first, " and ", both->second,
                  " share memory: list each once; if they were tied after the optimizer was "
                  "built, build it again; call the operator itself for one at a time");
}

std::vector<int64_t> workspace_sizes(int64_t number, Tensor plan) {
  const RuleInfo rule = rule_info(checked_rule("lowbit::workspace_sizes", number));
  const PlanRow* rows = checked_plan(plan, plan.size(0));
  WorkspaceSizes sizes{};
  for (size_t i = 0; i < static_cast<size_t>(plan.size(0)); ++i) {
    Job job{};
    read_shape(job, rule, rows[i], i);
    read_slots(job, rule, rows[i], i);
    place(job, rule, rows[i].dims > 2, Workspace{}, sizes);
  }
  return {sizes.begin(), sizes.end()};
}

std::vector<int64_t> workspace_regions(int64_t number, Tensor plan, int64_t phase) {
  const RuleInfo rule = rule_info(checked_rule("lowbit::workspace_regions", number));
  const PlanRow& row = *checked_plan(plan, 1);
  Job job{};
  read_slots(job, rule, row, 0);
  STD_TORCH_CHECK(phase >= 0 && phase <= rule.rounds, "lowbit::workspace_regions: phase ", phase,
                  " of ", rule.name, " measures nothing");
  const int round = static_cast<int>(phase);
  const std::vector<Region> regions = round < rule.rounds
                                          ? round_regions(row, round, rule.grid_factor[round] >= 0)
                                          : scale_regions(row, rule.slots);
  std::vector<int64_t> all;
  for (const Region& region : regions)
    all.insert(all.end(), {region.tensor, region.begin, region.width, region.rows});
  return all;
}

}  // namespace lowbit
