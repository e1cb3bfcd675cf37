// The launcher: the phases of a step as launches, and the C interface of abi.h. Host code, compiled
// with the kernels.
#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/step/accumulate.cuh"
#include "cuda/step/code.cuh"
#include "cuda/step/mean.cuh"
#include "cuda/step/order.h"
#include "cuda/step/scales.cuh"

namespace lowbit {

/// What lowbit_cuda_plan makes.
struct CudaPlan {
  cuda::Order order;
};

namespace cuda {
namespace {

const char* begin(int device) {
  static thread_local uint64_t loaded = 0;
  return [&]<size_t... i>(std::index_sequence<i...>) {
    return begin(device, loaded, kFast[i].kernel..., kFast[i].measure[0]..., kFast[i].measure[1]...,
                 kFast[i].measure[2]..., step_any, prepare, count_steps, code<true>, code<false>,
                 accumulate, add_means, measure, measure_scales, old_rows, finalize_factor, scales,
                 cut_scales);
  }(std::make_index_sequence<kFastCount>{});
}

/// The table in a workspace, and its size in bytes.
Table table_in(void* workspace, const Order& order, int64_t* bytes) {
  auto* at = static_cast<unsigned char*>(workspace);
  int64_t used = 0;
  const auto take = [&](auto* of, int64_t count) {
    auto* const here = reinterpret_cast<decltype(of)>(at == nullptr ? nullptr : at + used);
    used += ceil_div(count * static_cast<int64_t>(sizeof(*of)), 16) * 16;
    return here;
  };
  const int64_t count = order.count();
  Table t{};
  t.fast = take(t.fast, order.parts[kAny].begin * kFastBytes);
  t.jobs = take(t.jobs, count);
  t.ends = take(t.ends, count), t.matrix_ends = take(t.matrix_ends, count);
  t.moves = take(t.moves, count), t.kept = take(t.kept, count);
  t.first_unit = take(t.first_unit, count);
  t.job_of = take(t.job_of, order.units);
  *bytes = used;
  return t;
}

/// The entries of a table from job `at` on.
Table table_from(const Table& t, int64_t at) {
  return {t.fast + at * kFastBytes, t.jobs + at,  t.ends + at,
          t.matrix_ends + at,       t.moves + at, t.kept + at,
          t.first_unit + at,        t.job_of};
}

/// The rounds of a rule, for the host.
template <class U>
constexpr RoundShape round_of(int round) {
  RoundShape shape{round, -1, 0};
  if constexpr (rounds_of<U>() > 0) {
    shape.grid_factor = U::grid_factor(round);
    shape.totals = U::totals(round);
  }
  return shape;
}
template <class... U>
RoundShape round_at(int rule, int round, Types<U...>) {
  const RoundShape all[] = {round_of<U>(round)...};
  return all[rule];
}

/// Adds an item to the launch. Returns false if the launch is full.
bool add_item(Prepare& p, const Order::Item& item, int rounds, int* words) {
  Job job = *item.job;
  if (rounds == 0) {  // only sums need these fields
    job.numel = job.batches = job.inner_rows = job.inner_cols = 0;
    job.global_inner_rows = job.global_inner_cols = 0;
  }
  const auto word = [&](int w) {
    uint64_t value;
    std::memcpy(&value, reinterpret_cast<const char*>(&job) + 8 * w, 8);
    return value;
  };
  if (p.count == 0) {
    *words = 0;
    for (int w = 0; w < Prepare::kJobWords; ++w) p.written.first[w] = word(w);
  }
  if (p.count == Prepare::kJobs) return false;
  Prepare::Item& to = p.written.item[p.count];
  to = {};
  to.end = item.end, to.matrix_end = item.matrix_end, to.step = item.step, to.at = *words;
  to.units = static_cast<uint32_t>(item.units);
  to.first_unit = static_cast<uint32_t>(item.first_unit);
  to.entry = static_cast<uint32_t>(item.entry), to.number = item.number;
  to.counts = item.counts, to.fast = item.fast;
  for (int w = 0; w < Prepare::kJobWords; ++w) {
    if (word(w) == p.written.first[w]) continue;
    if (*words == Prepare::kWords) {
      *words = to.at;
      return false;
    }
    to.differs[w / 64] |= uint64_t{1} << w % 64;
    p.written.words[(*words)++] = word(w);
  }
  ++p.count;
  return true;
}

/// Adds the gradients of items from `at` on. Returns false if a fixed kernel cannot read one.
bool add_grads(Prepare& p, const CudaStep& call, const Order& order, int64_t at) {
  const int64_t left = order.count() - at;
  p.count = static_cast<int>(left < Prepare::kGrads ? left : Prepare::kGrads);
  for (int i = 0; i < p.count; ++i) {
    const Order::Item& item = order.items[static_cast<size_t>(at + i)];
    p.grad[i] = static_cast<const char*>(call.grads[item.source]) + item.grad_offset;
    if (item.fast && !aligned(p.grad[i], 16)) return false;
  }
  return true;
}

/// Prepares the table for this step, and steps. Writes the table before, if it is not there.
const char* launch_prepare(const CudaStep& call, const Table& table, const Order& order) {
  const auto chunk = std::make_unique_for_overwrite<Prepare>();  // too large for some stacks
  Prepare& p = *chunk;
  p.lr = call.lr;
  p.grad_scale = call.grad_scale;
  p.found_inf = call.found_inf;
  p.maximize = call.maximize;
  p.phase = call.phase, p.phases = call.phases;
  p.writes = call.writes;
  for (int k = 0; k < call.hypers; ++k) p.hyper[k] = call.hyper[k];
  const int rounds = rounds_at(order.rule, UpdateRules{});
  for (int64_t at = 0; at < order.count(); at += p.count) {
    p.table = table_from(table, at);
    p.count = 0;
    int words = 0;
    if (!call.writes && !add_grads(p, call, order, at))
      return "a gradient is not aligned as it was when the table was written";
    for (int n = 0; call.writes && at + n < order.count(); ++n) {
      if (!add_item(p, order.items[static_cast<size_t>(at + n)], rounds, &words)) break;
    }
    if (const char* error = launch(prepare, ceil_div(p.count, Prepare::kWarps),
                                   Prepare::kWarps * kLanes, call.stream, "launching prepare", p))
      return error;
  }
  std::vector<Steps> steps(order.shared.empty() ? 0 : 1);
  for (size_t at = 0; at < order.shared.size(); at += Steps::kMany) {
    const size_t left = order.shared.size() - at;
    steps[0].found_inf = call.found_inf;
    steps[0].count = static_cast<int>(left < Steps::kMany ? left : Steps::kMany);
    std::copy_n(order.shared.begin() + at, steps[0].count, steps[0].step);
    if (const char* error =
            launch(count_steps, 1, Steps::kThreads, call.stream, "launching count_steps", steps[0]))
      return error;
  }
  return nullptr;
}

/// Launches one kernel over the tiles (or matrices) of a batch, on as many blocks as fit.
template <class... Expected, class... Given>
const char* launch_batch(const CudaStep& call, void (*kernel)(Batch, Expected...), int warps,
                         const char* name, const Batch& batch, int64_t each,
                         const Given&... given) {
  if (batch.tiles == 0) return nullptr;
  int64_t blocks = 0;
  if (const char* error = explain(grid(call.device, kernel, batch.tiles * each, warps, &blocks),
                                  "asking for the device's size"))
    return error;
  return launch(kernel, blocks, warps * kLanes, call.stream, name, batch, given...);
}

const char* launch_scales(const CudaStep& call, std::initializer_list<ScaleWork> works) {
  if (call.scale_count == 0) return nullptr;
  std::vector<Scales> chunk(1);
  Scales& s = chunk[0];
  s.found_inf = call.found_inf;
  const bool combined =
      std::any_of(call.scales, call.scales + call.scale_count,
                  [](const CudaScale& scale) { return scale.col_absmax != nullptr; });
  for (const ScaleWork work : works) {
    if (work != ScaleWork::kWrite && !combined) continue;  // otherwise nothing to do
    for (int64_t at = 0; at < call.scale_count; at += Scales::kMany) {
      const int64_t left = call.scale_count - at;
      s.count = static_cast<int>(left < Scales::kMany ? left : Scales::kMany);
      for (int i = 0; i < s.count; ++i) s.at[i] = call.scales[at + i];
      if (const char* error = launch(scales, int64_t{s.count} * Scales::kBlocksEach,
                                     Scales::kThreads, call.stream, "launching scales", s, work))
        return error;
    }
  }
  return nullptr;
}

/// Zeroes the sums of a round, except those of the rows' old means.
const char* begin_sums(const CudaStep& call, const Batch& matrices, int factor) {
  for (int i = 0; i < 2; ++i) {
    if (call.sums_bytes[i] == 0) continue;
    if (const char* error =
            explain(cudaMemsetAsync(call.sums[i], 0, static_cast<size_t>(call.sums_bytes[i]),
                                    static_cast<cudaStream_t>(call.stream)),
                    "clearing sums"))
      return error;
  }
  return launch_batch(call, old_rows, kMatrixThreads / kLanes, "launching old_rows", matrices,
                      kMatrixThreads / kLanes, factor);
}

/// Orders the jobs of a phase.
const char* make_plan(const CudaStep& call, CudaPlan& plan, int64_t* bytes) {
  if (const char* error = begin(call.device)) return error;
  if (call.count > 0) plan.order.rule = call.jobs[0].rule;
  const int rounds = rounds_at(plan.order.rule, UpdateRules{});
  const char* error = order_jobs(call,
                                 call.phase == call.phases ? Walk::kUpdate
                                 : call.phase >= rounds    ? Walk::kMeasureScales
                                                           : Walk::kMeasure,
                                 plan.order);
  table_in(nullptr, plan.order, bytes);
  return error;
}

const char* run(const CudaStep& call) {
  if (call.count == 0) return nullptr;
  if (call.hypers > kRuleHypers) return "more hyperparameters than any rule takes";
  if (const char* error = begin(call.device)) return error;

  const int rule = call.plan->order.rule, rounds = rounds_at(rule, UpdateRules{});
  const bool updates = call.phase == call.phases;
  const Order& order = call.plan->order;
  int64_t bytes = 0;
  const Table table = table_in(call.workspace, order, &bytes);
  if (const char* error = launch_prepare(call, table, order)) return error;
  const Batch matrices{table.jobs, table.matrix_ends, order.count(), order.matrices,
                       call.found_inf};
  if (call.phase > 0 && call.phase <= rounds) {
    const RoundShape before = round_at(rule, call.phase - 1, UpdateRules{});
    if (before.grid_factor >= 0) {
      if (const char* error = launch_batch(call, finalize_factor, kMatrixThreads / kLanes,
                                           "launching finalize_factor", matrices,
                                           kMatrixThreads / kLanes, table.moves, before))
        return error;
    }
  }
  if (const char* error = launch_scales(call, {ScaleWork::kCombineOld})) return error;

  if (!updates) {
    const auto batch_of = [&](const Order::Part& p) {
      return Batch{table.jobs + p.begin, table.ends + p.begin, p.count, p.tiles, call.found_inf};
    };
    const Batch others = batch_of(order.parts[kAny]);
    if (call.phase >= rounds)
      return launch_batch(call, measure_scales, kAnyWarps, "launching measure_scales", others, 1);
    const RoundShape shape = round_at(rule, call.phase, UpdateRules{});
    if (shape.grid_factor >= 0) {
      if (const char* error = begin_sums(call, matrices, shape.grid_factor)) return error;
    }
    for (int k = 0; k < kAny; ++k) {
      if (order.parts[k].tiles == 0) continue;  // of another rule, which may have fewer rounds
      if (const char* error = launch_batch(call, kFast[k].measure[call.phase], kMeasureWarps,
                                           "launching measure", batch_of(order.parts[k]), 1, shape))
        return error;
    }
    return launch_batch(call, measure, kAnyWarps, "launching measure", others, 1, shape);
  }

  if (const char* error =
          launch_scales(call, {ScaleWork::kClear, ScaleWork::kKeep, ScaleWork::kCombineNew}))
    return error;
  for (int k = 0; k <= kAny; ++k) {
    const Order::Part& part = order.parts[k];
    if (part.units == 0) continue;
    const Units units{table.jobs + part.begin,
                      table.fast + part.begin * kFastBytes,
                      table.job_of + part.entry,
                      table.first_unit + part.begin,
                      static_cast<uint32_t>(part.units),
                      part.group,
                      call.found_inf};
    if (const char* error = launch(k == kAny ? step_any : kFast[k].kernel, part.blocks,
                                   (k == kAny ? kAnyWarps : kFastWarps) * kLanes, call.stream,
                                   "launching the step", units))
      return error;
  }
  if (order.cut) {
    const Batch batch{table.jobs, table.ends, order.count(), order.count() * CutScales::kBlocksEach,
                      call.found_inf};
    const int64_t max_blocks = int64_t{1} << 16;
    if (const char* error = launch(cut_scales, batch.tiles < max_blocks ? batch.tiles : max_blocks,
                                   CutScales::kThreads, call.stream, "launching cut_scales", batch))
      return error;
  }
  return launch_scales(call, {ScaleWork::kWrite});
}

template <bool kQuantize>
const char* run_code(const CudaCode& call) {
  const int64_t tiles = call.rows * ceil_div(call.cols, call.block > kTile ? call.block : kTile);
  if (tiles == 0) return nullptr;
  if (const char* error = begin(call.device)) return error;
  int64_t blocks = 0;
  if (const char* error = explain(grid(call.device, code<kQuantize>, tiles, kAnyWarps, &blocks),
                                  "asking for the device's size"))
    return error;
  return launch(code<kQuantize>, blocks, kAnyWarps * kLanes, call.stream,
                kQuantize ? "launching quantize" : "launching dequantize", call);
}

const char* run_accumulate(const CudaAccumulation& call) {
  const char* error = begin(call.device);
  return error ? error : launch_accumulate(call);
}

const char* run_means(const CudaMeans& call) {
  const char* error = begin(call.device);
  return error ? error : launch_means(call);
}

}  // namespace
}  // namespace cuda
}  // namespace lowbit

#define LB_EXPORT extern "C" __attribute__((visibility("default")))

LB_EXPORT int lowbit_cuda_abi() { return lowbit::kCudaAbi; }

LB_EXPORT const char* lowbit_cuda_plan(const lowbit::CudaStep* call, lowbit::CudaPlan** plan,
                                       int64_t* bytes) {
  auto made = std::make_unique<lowbit::CudaPlan>();
  const char* error = lowbit::cuda::make_plan(*call, *made, bytes);
  *plan = error == nullptr ? made.release() : nullptr;
  return error;
}
LB_EXPORT void lowbit_cuda_discard(lowbit::CudaPlan* plan) { delete plan; }

LB_EXPORT const char* lowbit_cuda_step(const lowbit::CudaStep* call) {
  return lowbit::cuda::run(*call);
}
LB_EXPORT const char* lowbit_cuda_quantize(const lowbit::CudaCode* call) {
  return lowbit::cuda::run_code<true>(*call);
}
LB_EXPORT const char* lowbit_cuda_dequantize(const lowbit::CudaCode* call) {
  return lowbit::cuda::run_code<false>(*call);
}
LB_EXPORT const char* lowbit_cuda_accumulate(const lowbit::CudaAccumulation* call) {
  return lowbit::cuda::run_accumulate(*call);
}
LB_EXPORT const char* lowbit_cuda_means(const lowbit::CudaMeans* call) {
  return lowbit::cuda::run_means(*call);
}
