// A step on the CPU: its phases in parallel over the tiles of all jobs, and what lies between them.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/bits.h"
#include "core/exact_sum.h"
#include "cpu/step.h"
#include "ops_step.h"

namespace lowbit {
namespace {

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

/// Keeps the maxima that were measured of a scale of rank 1, and makes them the scales that codes are
/// written with; codes are still read with those in `col_most`.
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
  const RuleInfo rule = rule_info(plan.rule);
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

}  // namespace

void step_cpu(StepArgs args) {
  auto& [name, params, grads, state, steps, scratch, plan, hyper, lr, grad_scale, found_inf,
         maximize, seed, phase] = args;
  Plan made = make_plan(args);
  const RuleInfo info = rule_info(made.rule);
  for (size_t i = 0; i < steps.size(); ++i)
    STD_TORCH_CHECK(steps[i].is_cpu(), "lowbit::step: the step of parameter ", i,
                    " must be on the CPU, as the parameter is");
  if (found_inf && number(*found_inf, "found_inf") != 0.0) return;
  if (lr) hyper[0] = number(*lr, "lr");
  const double g_scale =
      (maximize ? -1.0 : 1.0) / (grad_scale ? number(*grad_scale, "grad_scale") : 1.0);
  const int rounds = static_cast<int>(phase) < info.rounds ? static_cast<int>(phase) : info.rounds;
  for (size_t i = 0; i < made.jobs.size(); ++i) {
    Job& job = made.jobs[i];
    float* step = static_cast<float*>(steps[i].mutable_data_ptr());
    if (phase == 0) *step += 1.0f;
    const int64_t t = std::llrint(*step);
    prepare(job, hyper.data(), t, g_scale);
    job.random.step = static_cast<uint32_t>(t);
    job.write_param = hyper[0] != 0.0;
    for (int r = 0; r < rounds; ++r) {
      if (r == phase - 1 && info.grid_factor[r] >= 0) settle_factor(job, r);
      settle(job, r, phase == made.phases);
    }
  }
  if (phase < info.rounds && info.grid_factor[phase] >= 0) {
    for (const int k : {1, 2})
      std::memset(scratch[static_cast<size_t>(k)].mutable_data_ptr(), 0,
                  static_cast<size_t>(scratch[static_cast<size_t>(k)].numel()) * sizeof(int64_t));
  }
  run_phase(made, plan, static_cast<int>(phase));
}

}  // namespace lowbit
