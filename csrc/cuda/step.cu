// The launcher: the kernel for each job, and the C interface of abi.h. Host code, compiled with the
// kernels.
#include <algorithm>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/abi.h"
#include "cuda/accumulate.cuh"
#include "cuda/code.cuh"
#include "cuda/launch.h"
#include "cuda/measure.cuh"
#include "cuda/scales.cuh"
#include "cuda/step.cuh"

namespace lowbit::cuda {
namespace {

template <class F, class... Fs>
constexpr int index_of(Types<Fs...>) {
  int i = 0, found = -1;
  ((found = __is_same(F, Fs) ? i : found, ++i), ...);
  return found;
}

/// A kernel with fixed formats. The common combinations have one; all others use step_any.
struct Fast {
  int rule, param, grad, state[2];
  void (*kernel)(Batch);
};
template <class P, class G, class S0, class S1>
constexpr Fast fast() {
  return {index_of<AdamW>(UpdateRules{}),
          index_of<P>(ParamFormats{}),
          index_of<G>(GradFormats{}),
          {index_of<S0>(StateFormats{}), index_of<S1>(StateFormats{})},
          step_fast<AdamW, P, G, S0, S1>};
}
const Fast kFast[] = {
    fast<BFloat16Stochastic, BFloat16Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<BFloat16Stochastic, Float32Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<BFloat16Nearest, BFloat16Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<BFloat16Nearest, Float32Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<Float32Param, BFloat16Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<Float32Param, Float32Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<BFloat16Kahan, BFloat16Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<BFloat16Split8, BFloat16Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<BFloat16Split16, BFloat16Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<BFloat16Stochastic, BFloat16Grad, Dynamic4, PowerOne4Unsigned>(),
    fast<BFloat16Stochastic, Float32Grad, Dynamic4, PowerOne4Unsigned>(),
    fast<Float32Param, Float32Grad, Dynamic4, PowerOne4Unsigned>(),
    fast<BFloat16Stochastic, BFloat16Grad, Float8E4M3, Float8E4M3Unsigned>(),
    fast<Float32Param, Float32Grad, Float8E4M3, Float8E4M3Unsigned>(),
    // embeddings, heads, norms: full-precision state
    fast<BFloat16Stochastic, BFloat16Grad, Float32State, Float32State>(),
    fast<BFloat16Nearest, BFloat16Grad, Float32State, Float32State>(),
    fast<BFloat16Kahan, BFloat16Grad, Float32State, Float32State>(),
    fast<BFloat16Split8, BFloat16Grad, Float32State, Float32State>(),
    fast<BFloat16Split16, BFloat16Grad, Float32State, Float32State>(),
    fast<Float32Param, Float32Grad, Float32State, Float32State>(),
};
constexpr int kFastCount = sizeof(kFast) / sizeof(kFast[0]), kAny = kFastCount;

constexpr Shapes kHostShapes = make_shapes(StateFormats{});

template <class... P>
int param_bytes(int format, Types<P...>) {
  const int bytes[] = {static_cast<int>(sizeof(typename P::Storage))...};
  return bytes[format];
}
template <class... P>
int compensation_bytes(int format, Types<P...>) {
  const int bytes[] = {kHasCompensation<P> ? static_cast<int>(sizeof(typename P::Compensation))
                                           : 0 ...};
  return bytes[format];
}

bool aligned(const void* p, int bytes) {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0;
}

/// Whether the 8 values of a lane always exist, are aligned for 16-byte accesses, and lie inside
/// one block and one Philox group.
bool by_eights(const Job& job) {
  if (job.cols % 8 != 0 || job.global_cols % 8 != 0 || job.first % 8 != 0 || job.tile != kTile ||
      job.cut != kNoCut || job.front != 0 || job.back != 0 || !aligned(job.param, 16) ||
      !aligned(job.grad, 16) || !aligned(job.compensation, 16) ||
      job.rows * ceil_div(job.cols, kTile) >= int64_t{1} << 27)  // 32-bit indices
    return false;
  for (int k = 0; k < 2; ++k) {
    const StateSlot& slot = job.state[k];
    const int bytes = kHostShapes.at[slot.format].bits;  // of 8 values
    if (!aligned(slot.values, bytes < 16 ? bytes : 16) || slot.stochastic ||
        is_cross_tile(slot.kind))
      return false;
  }
  return true;
}

/// The kernel for a job: an index into kFast, or kAny.
int kernel_of(const Job& job) {
  for (int i = 0; i < kFastCount; ++i) {
    const Fast& f = kFast[i];
    if (f.rule == job.rule && f.param == job.param_format && f.grad == job.grad_format &&
        f.state[0] == job.state[0].format && f.state[1] == job.state[1].format) {
      return by_eights(job) ? i : kAny;
    }
  }
  return kAny;
}

/// The rows [begin, end) of a job as a job of its own, for rules that need no more than a block.
Job rows_of(const Job& whole, int64_t begin, int64_t end) {
  Job job = whole;
  const auto move = [](auto*& at, int64_t bytes) {
    using To = std::remove_reference_t<decltype(at)>;
    if (at != nullptr) at = reinterpret_cast<To>(reinterpret_cast<uintptr_t>(at) + bytes);
  };
  const int64_t room = begin * whole.cols, from = begin > 0 ? room - whole.front : 0;
  move(job.param, from * param_bytes(whole.param_format, ParamFormats{}));
  move(job.grad, from * bytes_at(whole.grad_format, GradFormats{}));
  move(job.compensation, room * compensation_bytes(whole.param_format, ParamFormats{}));
  const int64_t cut = whole.cut_row(begin);
  for (StateSlot& slot : job.state) {
    const Shape& shape = kHostShapes.at[slot.format];
    move(slot.values, begin * code_bytes(whole.cols, shape.bits));
    if (slot.kind == kBlock) {
      const int64_t blocks = whole.blocks(slot.block);
      move(slot.scales, begin * blocks * shape.scale_bytes);
      if (cut > 0) move(slot.block_next, 2 * cut * blocks * 4);
    }
    if (slot.row_stride != 0) {
      move(slot.row_absmax, 4 * begin);
      move(slot.row_next, 4 * begin);
    }
  }
  job.first += begin * whole.global_cols;
  job.rows = end - begin;
  if (begin > 0) job.front = 0;
  if (end < whole.rows) job.back = 0;
  if (job.cut == kCutEnds && job.cut_rows() == 0) job.cut = kNoCut;
  return job;
}

/// The maximum number of jobs that replace one.
int max_parts(const Job& job) { return job.front > 0 || job.back > 0 ? 3 : 1; }

/// Splits a job if a faster kernel can process the whole rows between its cut ones.
std::vector<Job> parts_of(const Job& job) {
  if (max_parts(job) == 1 || job.cut == kCutAll) return {job};
  const int64_t begin = job.front > 0, end = job.rows - (job.back > 0);
  if (begin >= end) return {job};
  const Job middle = rows_of(job, begin, end);
  if (kernel_of(middle) == kAny) return {job};
  std::vector<Job> parts{middle};
  if (begin > 0) parts.push_back(rows_of(job, 0, begin));
  if (end < job.rows) parts.push_back(rows_of(job, end, job.rows));
  return parts;
}

const char* begin(int device) {
  static thread_local uint64_t loaded = 0;
  return [&]<size_t... i>(std::index_sequence<i...>) {
    return begin(device, loaded, kFast[i].kernel..., step_any, prepare, count_steps, code<true>,
                 code<false>, accumulate, measure, measure_scales, old_rows, finalize_factor,
                 scales, cut_scales);
  }(std::make_index_sequence<kFastCount>{});
}

Table table_in(void* workspace, int64_t count) {
  Table t;
  t.jobs = static_cast<Job*>(workspace);
  t.ends = reinterpret_cast<int64_t*>(t.jobs + count);
  t.matrix_ends = t.ends + count;
  t.moves = reinterpret_cast<FactorMove*>(t.matrix_ends + count);
  return t;
}
int64_t table_bytes(int64_t count) {
  return count * static_cast<int64_t>(sizeof(Job) + 2 * sizeof(int64_t) + sizeof(FactorMove));
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
template <class... U>
int rounds_at(int rule, Types<U...>) {
  const int all[] = {rounds_of<U>()...};
  return all[rule];
}

/// The order of the jobs in the workspace, kernel by kernel, with running tiles within the batch of
/// a kernel and running matrices over all jobs.
struct Order {
  struct Part {
    int64_t begin, count, tiles;
  };
  struct Item {
    const Job* job;
    float* step;
    bool counts;
    int64_t end, matrix_end;
  };
  std::vector<Item> items;
  std::deque<Job> made;        // parts of jobs
  std::vector<float*> shared;  // steps of jobs with several parts
  Part parts[kFastCount + 1];
  int64_t matrices = 0;
  bool cut = false;
  int64_t count() const { return static_cast<int64_t>(items.size()); }
};

/// The units of the launches of a phase.
enum class Walk { kUpdate, kMeasure, kMeasureScales };

Order order_jobs(const CudaStep& call, Walk walk) {
  Order order;
  std::vector<Order::Item> all[kFastCount + 1];
  for (int64_t i = 0; i < call.count; ++i) {
    const Job& job = call.jobs[i];
    order.cut |= job.cut != kNoCut;
    if (walk != Walk::kUpdate) {
      all[kAny].push_back({&job, call.steps[i], true, 0, 0});
      continue;
    }
    if (max_parts(job) == 1) {
      all[kernel_of(job)].push_back({&job, call.steps[i], true, 0, 0});
      continue;
    }
    const std::vector<Job> parts = parts_of(job);
    for (const Job& part : parts) {
      order.made.push_back(part);
      all[kernel_of(part)].push_back({&order.made.back(), call.steps[i], parts.size() == 1, 0, 0});
    }
    if (parts.size() > 1 && call.phase == 0) order.shared.push_back(call.steps[i]);
  }
  for (int k = 0; k <= kAny; ++k) {
    Order::Part& part = order.parts[k] = {order.count(), static_cast<int64_t>(all[k].size()), 0};
    for (Order::Item& item : all[k]) {
      const Job& job = *item.job;
      item.end = part.tiles += walk == Walk::kMeasure ? measure_parts(job)
                               : walk == Walk::kMeasureScales
                                   ? job.measured_rows(kMaxSlots) * job.tiles_per_row()
                                   : job.tiles();
      item.matrix_end = order.matrices += finalize_parts(job);
      order.items.push_back(item);
    }
  }
  return order;
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
    for (int w = 0; w < Prepare::kJobWords; ++w) p.first[w] = word(w);
  }
  if (p.count == Prepare::kJobs) return false;
  Prepare::Item& to = p.item[p.count];
  to = {item.end, item.matrix_end, item.step, {}, *words, item.counts};
  for (int w = 0; w < Prepare::kJobWords; ++w) {
    if (word(w) == p.first[w]) continue;
    if (*words == Prepare::kWords) {
      *words = to.at;
      return false;
    }
    to.differs[w / 64] |= uint64_t{1} << w % 64;
    p.words[(*words)++] = word(w);
  }
  ++p.count;
  return true;
}

/// Writes the job table and steps.
const char* launch_prepare(const CudaStep& call, const Table& table, const Order& order) {
  std::vector<Prepare> chunk(1);  // on the heap: too large for some stacks
  Prepare& p = chunk[0];
  p.lr = call.lr;
  p.grad_scale = call.grad_scale;
  p.found_inf = call.found_inf;
  p.maximize = call.maximize;
  p.phase = call.phase, p.phases = call.phases;
  for (int k = 0; k < call.hypers; ++k) p.hyper[k] = call.hyper[k];
  const int rounds = rounds_at(call.jobs[0].rule, UpdateRules{});
  for (int64_t at = 0; at < order.count(); at += p.count) {
    p.table = {table.jobs + at, table.ends + at, table.matrix_ends + at, table.moves + at};
    p.count = 0;
    int words = 0;
    for (int i = 0; at + i < order.count(); ++i) {
      if (!add_item(p, order.items[at + i], rounds, &words)) break;
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

const char* run(const CudaStep& call) {
  if (call.count == 0) return nullptr;
  if (call.hypers > kRuleHypers) return "more hyperparameters than any rule takes";
  if (const char* error = begin(call.device)) return error;

  const int rule = call.jobs[0].rule, rounds = rounds_at(rule, UpdateRules{});
  const bool updates = call.phase == call.phases;
  const Order order = order_jobs(call, updates                ? Walk::kUpdate
                                       : call.phase >= rounds ? Walk::kMeasureScales
                                                              : Walk::kMeasure);
  const Table table = table_in(call.workspace, order.count());
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
    const Batch batch{table.jobs, table.ends, order.count(), order.parts[kAny].tiles,
                      call.found_inf};
    if (call.phase >= rounds)
      return launch_batch(call, measure_scales, kAnyWarps, "launching measure_scales", batch, 1);
    const RoundShape shape = round_at(rule, call.phase, UpdateRules{});
    if (shape.grid_factor >= 0) {
      if (const char* error = begin_sums(call, matrices, shape.grid_factor)) return error;
    }
    return launch_batch(call, measure, kAnyWarps, "launching measure", batch, 1, shape);
  }

  if (const char* error =
          launch_scales(call, {ScaleWork::kClear, ScaleWork::kKeep, ScaleWork::kCombineNew}))
    return error;
  for (int k = 0; k <= kAny; ++k) {
    const Order::Part& part = order.parts[k];
    const Batch batch{table.jobs + part.begin, table.ends + part.begin, part.count, part.tiles,
                      call.found_inf};
    if (const char* error =
            launch_batch(call, k == kAny ? step_any : kFast[k].kernel,
                         k == kAny ? kAnyWarps : kFastWarps, "launching the step", batch, 1))
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

}  // namespace
}  // namespace lowbit::cuda

#define LB_EXPORT extern "C" __attribute__((visibility("default")))

LB_EXPORT int lowbit_cuda_abi() { return lowbit::kCudaAbi; }

/// The size of the workspace in bytes: the jobs, then the tables' entries for each job.
LB_EXPORT int64_t lowbit_cuda_workspace(const lowbit::Job* jobs, int64_t count) {
  int64_t parts = 0;
  for (int64_t i = 0; i < count; ++i) parts += lowbit::cuda::max_parts(jobs[i]);
  return lowbit::cuda::table_bytes(parts);
}

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
