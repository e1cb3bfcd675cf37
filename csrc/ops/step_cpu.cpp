// A step on the CPU: its phases in parallel over the tiles of all jobs, and what lies between them.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "catalog/coefficients.h"
#include "core/bits.h"
#include "core/exact_sum.h"
#include "cpu/step.h"
#include "ops/step.h"
#include "policy/workspace.h"

namespace lowbit {
namespace {

/// In parallel over the parts of all jobs: fn(job, begin, end).
template <class Count, class Fn>
void for_parts(std::vector<Job>& jobs, int64_t grain, const Count& count, const Fn& fn) {
  std::vector<int64_t> ends(jobs.size());  // running sum of parts
  int64_t parts = 0;
  for (size_t i = 0; i < jobs.size(); ++i) ends[i] = parts += count(jobs[i]);
  parallel_for(parts, grain, [&](int64_t begin, int64_t end) {
    size_t i =
        static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (int64_t at = begin; at < end; at = ends[i++]) {
      if (at == ends[i]) continue;
      const int64_t start = i > 0 ? ends[i - 1] : 0;
      fn(jobs[i], at - start, std::min(end, ends[i]) - start);
    }
  });
}

/// The maxima of a scale of rank 1 over all columns: of each column, the minimum over its
/// dimensions after the first.
void combine(const SlotState& state, uint32_t* out) {
  const std::vector<int64_t>& dims = state.dims;
  int64_t cols = 1;
  for (size_t d = 1; d < dims.size(); ++d) cols *= dims[d];
  if (cols == 0) return;
  int64_t inner = cols;
  for (size_t d = 1; d < dims.size(); ++d) {
    const auto* bits = reinterpret_cast<const uint32_t*>(state.absmax[d]);
    inner /= dims[d];
    for (int64_t c = 0; c < cols; ++c) {
      const uint32_t b = bits[c / inner % dims[d]];
      out[c] = d == 1 || b < out[c] ? b : out[c];
    }
  }
}

/// Keeps the maxima that were measured of a scale of rank 1, and makes them the scales that codes
/// are written with; codes are still read with those in `col_absmax`.
void keep_scales(Job& job, int k, const SlotState& state) {
  StateSlot& slot = job.state[k];
  if (!state.combines()) return;
  const std::vector<int64_t>& dims = state.dims;
  for (size_t d = 1; d < dims.size(); ++d) std::fill_n(state.absmax[d], dims[d], 0.0f);
  if (job.cols == 0) return;
  int64_t inner = job.cols;
  for (size_t d = 1; d < dims.size(); ++d) {
    auto* bits = reinterpret_cast<uint32_t*>(state.absmax[d]);
    inner /= dims[d];
    for (int64_t c = 0; c < job.cols; ++c) {
      uint32_t& b = bits[c / inner % dims[d]];
      b = std::max(b, slot.col_next[c] > kInfinityBits ? kCanonicalNan : slot.col_next[c]);
    }
  }
  combine(state, slot.col_next);
}

/// After the step: the scales of the codes that were written are the state's.
void write_scales(Job& job, int k, const SlotState& state) {
  const StateSlot& slot = job.state[k];
  const auto copy = [](float* to, const uint32_t* from, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
      reinterpret_cast<uint32_t*>(to)[i] = from[i] > kInfinityBits ? kCanonicalNan : from[i];
  };
  if (slot.row_next != nullptr)
    copy(state.absmax[0], slot.row_next, slot.kind == kTensor ? 1 : job.rows);
  if (slot.col_next != nullptr && !state.combines())
    copy(state.absmax.back(), slot.col_next, job.cols);
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
  if (!job.one_matrix()) return;
  int64_t* total = job.totals + (round * kMaxTotals + kGridTotal) * ExactSum::kWords;
  exact_merge_columns(factor.col_sums, job.inner_cols, job.inner_rows, total);
}

/// Calls fn(job, slot, its state) for every slot with cross-tile scales.
template <class Fn>
void each_cross_tile(const Plan& plan, std::vector<Job>& jobs, const Fn& fn) {
  const int slots = rule_info(plan.rule).slots;
  for (size_t i = 0; i < jobs.size(); ++i) {
    for (int k = 0; k < slots; ++k) {
      if (is_cross_tile(jobs[i].state[k].kind))
        fn(jobs[i], k, plan.states[i * kMaxSlots + static_cast<size_t>(k)]);
    }
  }
}

/// A round: the sums that the rule asks for before it updates.
void measure_round(std::vector<Job>& jobs, int round, int factor, const cpu::Kernels& kernels) {
  for (Job& job : jobs) {
    if (factor >= 0) add_old_rows(job, job.factor[factor]);
  }
  const auto parts = [&](const Job& job) { return cpu::measure_parts(job, round); };
  for_parts(jobs, 1, parts, [&](const Job& job, int64_t begin, int64_t end) {
    cpu::measure(job, round, begin, end, kernels);
  });
  for (Job& job : jobs) {
    if (factor >= 0) add_grid_total(job, round, job.factor[factor]);
  }
}

void update(const Plan& plan, std::vector<Job>& jobs, bool long_tiles,
            const cpu::Kernels& kernels) {
  each_cross_tile(plan, jobs, keep_scales);
  constexpr int64_t kGrain = 32;  // tiles, of 512 values where rows are long: 20 microseconds
  if (!long_tiles) lengthen_tiles(jobs);
  for_parts(
      jobs, kGrain, [](const Job& job) { return job.tiles(); },
      [&](const Job& job, int64_t begin, int64_t end) {
        if (end == job.tiles() && &job != &jobs.back()) cpu::fetch_first_tile(*(&job + 1));
        cpu::step(job, begin, end, kernels);
      });
  each_cross_tile(plan, jobs, write_scales);
  for (const Job& job : jobs) cpu::write_cut_scales(job, kernels);
}

/// One phase: a measuring pass, or the update behind the last of them.
void run_phase(const Plan& plan, std::vector<Job>& jobs, int phase, bool long_tiles) {
  const RuleInfo rule = rule_info(plan.rule);
  const cpu::Kernels& kernels = cpu::kernels();
  each_cross_tile(plan, jobs, [](Job& job, int k, const SlotState& state) {
    if (state.combines()) combine(state, const_cast<uint32_t*>(job.state[k].col_absmax));
  });
  if (phase < rule.rounds) {
    measure_round(jobs, phase, rule.grid_factor[phase], kernels);
  } else if (phase < plan.phases) {
    for_parts(jobs, 1, cpu::scale_parts, [&](const Job& job, int64_t begin, int64_t end) {
      cpu::measure_scales(job, begin, end, kernels);
    });
  } else {
    update(plan, jobs, long_tiles, kernels);
  }
}

/// Counts the step, and gives the jobs its coefficients and what earlier rounds measured.
void begin_phase(const Plan& plan, std::vector<Job>& jobs, const StepCall& call, double g_scale) {
  const RuleInfo rule = rule_info(plan.rule);
  const int phase = static_cast<int>(call.phase), rounds = std::min(phase, rule.rounds);
  unsigned char coef[sizeof(Job::coef)];
  std::optional<int64_t> last;  // the step of which coef is; any number may be one
  for (size_t i = 0; i < jobs.size(); ++i) {
    Job& job = jobs[i];
    float& step = *plan.steps[i];
    if (phase == 0) step += 1.0f;
    const int64_t t = std::llrint(step);
    if (t == last) {  // of the same rule and hyperparameters
      std::memcpy(job.coef, coef, sizeof(coef));
    } else {
      prepare(job, call.hyper.data(), t, g_scale);
      std::memcpy(coef, job.coef, sizeof(coef));
      last = t;
    }
    job.random.step = static_cast<uint32_t>(t);
    job.write_param = call.hyper[0] != 0.0;
    for (int r = 0; r < rounds; ++r) {
      if (r == phase - 1 && rule.grid_factor[r] >= 0) finalize_factor(job, r);
      finalize(job, r, phase == plan.phases);
    }
  }
  if (phase >= rule.rounds || rule.grid_factor[phase] < 0) return;
  for (const WorkspaceTensor tensor : {kRowSums, kColSums}) {
    const Tensor& sums = call.workspace[tensor];
    std::fill_n(static_cast<int64_t*>(sums.mutable_data_ptr()), sums.numel(),
                0);  // none of an empty tensor
  }
}

}  // namespace

void lengthen_tiles(std::vector<Job>& jobs) {
  for (Job& job : jobs) cpu::lengthen_tiles(job);
}

void step_cpu(const Plan& plan, std::vector<Job>& jobs, StepCall& call, bool long_tiles) {
  if (call.found_inf && number(*call.found_inf, "found_inf") != 0.0) return;
  if (call.lr) call.hyper[0] = number(*call.lr, "lr");
  const double scale = call.grad_scale ? number(*call.grad_scale, "grad_scale") : 1.0;
  begin_phase(plan, jobs, call, (call.maximize ? -1.0 : 1.0) / scale);
  run_phase(plan, jobs, static_cast<int>(call.phase), long_tiles);
}

}  // namespace lowbit
