// The kernel of each job, and the order of jobs in a table, kernel by kernel. Host code.
#pragma once

#include <cstring>
#include <deque>
#include <type_traits>
#include <vector>

#include "cuda/abi.h"
#include "cuda/launch.h"
#include "cuda/step/measure_fast.cuh"
#include "cuda/step/step.cuh"

namespace lowbit::cuda {

template <class F, class... Fs>
constexpr int index_of(Types<Fs...>) {
  int i = 0, found = -1;
  ((found = __is_same(F, Fs) ? i : found, ++i), ...);
  return found;
}

constexpr int kMaxRounds = 3;  // of a rule with fixed kernels

/// A kernel with fixed formats. The common combinations have one; all others use step_any.
struct Fast {
  int rule, param, grad, state[3];  // as many states as the rule has
  bool drawn[3];                    // whether it rounds them at random
  void (*kernel)(Units);
  void (*measure[kMaxRounds])(Batch, RoundShape);  // of the rule's rounds, or null
};
/// The kernel of a measuring round, which has the formats of those states that the round reads.
template <class U, int kRound, class P, class G, class... S>
constexpr auto measure_with() {
  if constexpr ((reads_of<U>(kRound) & kReadsState) != 0) {
    return measure_fast<U, kRound, P, G, S...>;
  } else {
    return measure_fast<U, kRound, P, G>;
  }
}
template <class U, class P, class G, class... S>
constexpr Fast fast() {
  Fast f{index_of<U>(UpdateRules{}),
         index_of<P>(ParamFormats{}),
         index_of<G>(GradFormats{}),
         {index_of<S>(StateFormats{})...},
         {},
         step_fast<U, P, G, S...>,
         {}};
  static_assert(rounds_of<U>() <= kMaxRounds);
  if constexpr (rounds_of<U>() > 0) f.measure[0] = measure_with<U, 0, P, G, S...>();
  if constexpr (rounds_of<U>() > 1) f.measure[1] = measure_with<U, 1, P, G, S...>();
  if constexpr (rounds_of<U>() > 2) f.measure[2] = measure_with<U, 2, P, G, S...>();
  [[maybe_unused]] int k = 0;
  ((f.drawn[k] = is_drawn<U, S>(k), ++k), ...);
  return f;
}
/// With states of the format M where they have a sign, and V where not. A mean over thousands of
/// steps is in bfloat16 beside codes, as presets keep it.
template <class U, class P, class G, class M, class V>
constexpr Fast fast_with() {
  if constexpr (U::kSlots == 0) {
    return fast<U, P, G>();
  } else if constexpr (U::kSlots == 1) {
    return fast<U, P, G, M>();
  } else if constexpr (U::kSlots == 2) {
    return fast<U, P, G, M, V>();
  } else {
    return fast<U, P, G, M, std::conditional_t<M::kScaled, BFloat16State, M>, V>();
  }
}
// bfloat16 parameters with stochastic rounding, and float32 ones.
template <class U, class M, class V>
constexpr Fast fast_bfloat16() {
  return fast_with<U, BFloat16Stochastic, BFloat16Grad, M, V>();
}
template <class U, class M, class V>
constexpr Fast fast_float32() {
  return fast_with<U, Float32Param, Float32Grad, M, V>();
}
#define LB_FAST_FORMATS(U)                                                                       \
  fast_bfloat16<U, Dynamic8, Dynamic8Unsigned>(), fast_float32<U, Dynamic8, Dynamic8Unsigned>(), \
      fast_bfloat16<U, Dynamic4, PowerOne4Unsigned>(),                                           \
      fast_float32<U, Dynamic4, PowerOne4Unsigned>(),                                            \
      fast_bfloat16<U, Float8E4M3, Float8E4M3Unsigned>(),                                        \
      fast_float32<U, Float8E4M3, Float8E4M3Unsigned>()

const Fast kFast[] = {
    fast<AdamW, BFloat16Stochastic, BFloat16Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<AdamW, BFloat16Stochastic, Float32Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<AdamW, BFloat16Nearest, BFloat16Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<AdamW, BFloat16Nearest, Float32Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<AdamW, Float32Param, BFloat16Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<AdamW, Float32Param, Float32Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<AdamW, BFloat16Kahan, BFloat16Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<AdamW, BFloat16Split8, BFloat16Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<AdamW, BFloat16Split16, BFloat16Grad, Dynamic8, Dynamic8Unsigned>(),
    fast<AdamW, BFloat16Stochastic, BFloat16Grad, Dynamic4, PowerOne4Unsigned>(),
    fast<AdamW, BFloat16Stochastic, Float32Grad, Dynamic4, PowerOne4Unsigned>(),
    fast<AdamW, Float32Param, Float32Grad, Dynamic4, PowerOne4Unsigned>(),
    fast<AdamW, BFloat16Stochastic, BFloat16Grad, Float8E4M3, Float8E4M3Unsigned>(),
    fast<AdamW, Float32Param, Float32Grad, Float8E4M3, Float8E4M3Unsigned>(),
    fast<AdamW, BFloat16Stochastic, BFloat16Grad, Companded8, Companded8Unsigned>(),
    fast<AdamW, BFloat16Split8, BFloat16Grad, Companded8, Companded8Unsigned>(),
    fast<AdamW, Float32Param, Float32Grad, Companded8, Companded8Unsigned>(),
    fast<AdamW, BFloat16Stochastic, BFloat16Grad, Log8Signed, Log8>(),
    fast<AdamW, Float32Param, Float32Grad, Log8Signed, Log8>(),
    // norms, biases, and what is asked to keep full-precision state
    fast<AdamW, BFloat16Stochastic, BFloat16Grad, Float32State, Float32State>(),
    fast<AdamW, BFloat16Nearest, BFloat16Grad, Float32State, Float32State>(),
    fast<AdamW, BFloat16Kahan, BFloat16Grad, Float32State, Float32State>(),
    fast<AdamW, BFloat16Split8, BFloat16Grad, Float32State, Float32State>(),
    fast<AdamW, BFloat16Split16, BFloat16Grad, Float32State, Float32State>(),
    fast<AdamW, Float32Param, Float32Grad, Float32State, Float32State>(),
    // the other rules that many people use
    LB_FAST_FORMATS(Adam),
    LB_FAST_FORMATS(Lion),
    LB_FAST_FORMATS(SgdMomentum),
    LB_FAST_FORMATS(Ademamix),
    LB_FAST_FORMATS(AdafactorMomentum),
    fast_bfloat16<AdafactorMomentum, Log8Signed, None>(),
    fast<Lion, BFloat16Split8, BFloat16Grad, Companded8>(),
    fast<SgdMomentum, BFloat16Split8, BFloat16Grad, Companded8>(),
    fast<Rmsprop, BFloat16Stochastic, BFloat16Grad, Dynamic8Unsigned>(),
    fast<Rmsprop, Float32Param, Float32Grad, Dynamic8Unsigned>(),
    fast<Adagrad, BFloat16Stochastic, BFloat16Grad, Dynamic8Unsigned>(),
    fast<Adagrad, Float32Param, Float32Grad, Dynamic8Unsigned>(),
    fast_bfloat16<Lamb, Dynamic8, Dynamic8Unsigned>(),
    fast_float32<Lamb, Dynamic8, Dynamic8Unsigned>(),
    fast_bfloat16<Lars, Dynamic8, None>(),
    fast_float32<Lars, Dynamic8, None>(),
    fast_bfloat16<Sgd, None, None>(),
    fast_float32<Sgd, None, None>(),
    // Muon's update is in bfloat16 before it is orthogonalized, and after
    fast<MuonMomentum, BFloat16Nearest, BFloat16Grad, Dynamic8>(),
    fast<MuonMomentum, BFloat16Nearest, Float32Grad, Dynamic8>(),
    fast<MuonMomentum, BFloat16Nearest, BFloat16Grad, Float32State>(),
    fast<MuonMomentum, BFloat16Nearest, Float32Grad, Float32State>(),
    fast<Muon, BFloat16Stochastic, BFloat16Grad>(),
    fast<Muon, Float32Param, BFloat16Grad>(),
    fast_bfloat16<Came, Dynamic8, None>(),
    fast_float32<Came, Dynamic8, None>(),
    fast_bfloat16<AdamWFactored, Dynamic8, Dynamic8Unsigned>(),
    fast_float32<AdamWFactored, Dynamic8, Dynamic8Unsigned>(),
    fast_bfloat16<AdamWFactored, Dynamic4, PowerOne4Unsigned>(),
    fast_bfloat16<Adafactor, None, None>(),
    fast_float32<Adafactor, None, None>(),
    fast_bfloat16<Adam, Float32State, Float32State>(),
    fast_float32<Adam, Float32State, Float32State>(),
    fast_bfloat16<Lion, Float32State, Float32State>(),
    fast_float32<Lion, Float32State, Float32State>(),
    fast_bfloat16<SgdMomentum, Float32State, Float32State>(),
    fast_float32<SgdMomentum, Float32State, Float32State>(),
    fast_bfloat16<Ademamix, Float32State, Float32State>(),
    fast_float32<Ademamix, Float32State, Float32State>(),
};
#undef LB_FAST_FORMATS
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

template <class... U>
int factors_at(int rule, Types<U...>) {
  const int all[] = {factors_of<U>()...};
  return all[rule];
}
template <class... U>
int slots_at(int rule, Types<U...>) {
  const int all[] = {U::kSlots...};
  return all[rule];
}
template <class... U>
int rounds_at(int rule, Types<U...>) {
  const int all[] = {rounds_of<U>()...};
  return all[rule];
}

inline bool aligned(const void* p, int bytes) {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0;
}

/// Whether the 8 values of a lane always exist, are aligned for 16-byte accesses, and lie inside
/// one block and one Philox group.
inline bool by_eights(const Job& job) {
  if (job.cols % 8 != 0 || job.global_cols % 8 != 0 || job.first % 8 != 0 || job.tile != kTile ||
      job.cut != kNoCut || job.front != 0 || job.back != 0 || !aligned(job.param, 16) ||
      !aligned(job.grad, 16) || !aligned(job.compensation, 16) ||
      job.rows * ceil_div(job.cols, kTile) >= int64_t{1} << 27)  // 32-bit indices
    return false;
  for (int k = 0; k < factors_at(job.rule, UpdateRules{}); ++k) {
    if (job.inner_cols % 8 != 0 || !aligned(job.factor[k].col, 16)) return false;
  }
  for (const StateSlot& slot : job.state) {
    const int bytes = kHostShapes.at[slot.format].bits;  // of 8 values
    if (!aligned(slot.values, bytes < 16 ? bytes : 16) || is_cross_tile(slot.kind)) return false;
  }
  return true;
}

/// The kernel for a job: an index into kFast, or kAny.
inline int kernel_of(const Job& job) {
  for (int i = 0; i < kFastCount; ++i) {
    const Fast& f = kFast[i];
    bool same = f.rule == job.rule && f.param == job.param_format && f.grad == job.grad_format;
    for (int k = 0; same && k < slots_at(job.rule, UpdateRules{}); ++k)
      same = f.state[k] == job.state[k].format && f.drawn[k] == job.state[k].stochastic;
    if (same) return by_eights(job) ? i : kAny;
  }
  return kAny;
}

/// The kernel that measures a job.
inline int measure_kernel_of(const Job& job) {
  if (job.inner_cols != job.cols || job.batches != 1) return kAny;
  const int k = kernel_of(job);
  return k != kAny && kFast[k].measure[0] != nullptr ? k : kAny;
}

/// The rows [begin, end) of a job as a job of its own, for rules that need no more than a block.
inline Job rows_of(const Job& whole, int64_t begin, int64_t end) {
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
inline int max_parts(const Job& job) { return job.front > 0 || job.back > 0 ? 3 : 1; }

/// Splits a job if a faster kernel can process the whole rows between its cut ones.
inline std::vector<Job> parts_of(const Job& job) {
  if (max_parts(job) == 1 || job.cut == kCutAll || rounds_at(job.rule, UpdateRules{}) > 0)
    return {job};  // what is measured belongs to the whole
  const int64_t begin = job.front > 0, end = job.rows - (job.back > 0);
  if (begin >= end) return {job};
  const Job middle = rows_of(job, begin, end);
  if (kernel_of(middle) == kAny) return {job};
  std::vector<Job> parts{middle};
  if (begin > 0) parts.push_back(rows_of(job, 0, begin));
  if (end < job.rows) parts.push_back(rows_of(job, end, job.rows));
  return parts;
}

// ---- the order of a table ----

/// The units of the launches of a phase.
enum class Walk { kUpdate, kMeasure, kMeasureScales };

/// The order of the jobs in the workspace, kernel by kernel, with running tiles of what measures,
/// running units within a kernel of the update, and running matrices over all jobs.
struct Order {
  struct Part {
    int64_t begin = 0, count = 0, tiles = 0;
    int64_t units = 0, entry = 0, blocks = 0;  // of the update; entry: its first in Table::job_of
    uint32_t group = 1;                        // tiles of a unit
  };
  struct Item {
    const Job* job;  // valid until the table is written
    float* step;
    bool counts;
    int64_t source, grad_offset;  // the job that the caller gave, and bytes from its gradient
    int64_t end, matrix_end;
    int64_t first_unit, units, entry;
    uint32_t number;
    bool fast;
  };
  std::vector<Item> items;
  std::deque<Job> made;        // parts of jobs
  std::vector<float*> shared;  // steps of jobs with several parts
  Part parts[kFastCount + 1];
  int64_t matrices = 0, units = 0;
  int rule = 0;
  bool cut = false;
  int64_t count() const { return static_cast<int64_t>(items.size()); }
};

/// The most tiles of a unit: a warp then reads 8 neighboring tiles, and looks for a job after them.
constexpr uint32_t kMaxGroup = 8;
/// Units per warp below which units get shorter, so that no warp has much more to do than others.
constexpr int64_t kUnitsEach = 8;
/// Units of a kernel above which units get longer, so that their table stays small.
constexpr int64_t kMaxUnits = int64_t{1} << 18;

/// The number of tiles of a unit, a power of two, for as many tiles and warps.
inline uint32_t group_of(int64_t tiles, int64_t warps) {
  uint32_t group = 1;
  while (group < kMaxGroup && tiles >= 2 * group * kUnitsEach * warps) group *= 2;
  while (tiles / group > kMaxUnits) group *= 2;
  return group;
}

/// The tiles of a job, or other units, over which kernel k walks.
inline int64_t walked(const Job& job, Walk walk, int k) {
  if (walk == Walk::kMeasure) return measure_parts(job);
  if (walk == Walk::kMeasureScales) return job.measured_rows(kMaxSlots) * job.tiles_per_row();
  return k == kAny ? job.tiles() : fast_tiles(job);
}

inline const char* order_jobs(const CudaStep& call, Walk walk, Order& order) {
  std::vector<Order::Item> all[kFastCount + 1];
  for (int64_t i = 0; i < call.count; ++i) {
    const Job& job = call.jobs[i];
    Order::Item item{};
    item.job = &job, item.step = call.steps[i], item.counts = true, item.source = i;
    order.cut |= job.cut != kNoCut;
    if (walk != Walk::kUpdate) {
      all[walk == Walk::kMeasure ? measure_kernel_of(job) : kAny].push_back(item);
      continue;
    }
    if (max_parts(job) == 1) {
      all[kernel_of(job)].push_back(item);
      continue;
    }
    const std::vector<Job> parts = parts_of(job);
    for (const Job& part : parts) {
      order.made.push_back(part);
      item.job = &order.made.back(), item.counts = parts.size() == 1;
      item.grad_offset = static_cast<const char*>(part.grad) - static_cast<const char*>(job.grad);
      all[kernel_of(part)].push_back(item);
    }
    if (parts.size() > 1 && call.phase == 0) order.shared.push_back(call.steps[i]);
  }
  for (int k = 0; k <= kAny; ++k) {
    Order::Part& part = order.parts[k];
    part.begin = order.count(), part.count = static_cast<int64_t>(all[k].size());
    for (const Order::Item& item : all[k]) part.tiles += walked(*item.job, walk, k);
    if (walk == Walk::kUpdate && part.tiles > 0) {
      const int warps = k == kAny ? kAnyWarps : kFastWarps;
      if (const char* error = explain(
              max_blocks(call.device, k == kAny ? step_any : kFast[k].kernel, warps, &part.blocks),
              "asking for the device's size"))
        return error;
      part.group = group_of(part.tiles, part.blocks * warps);
      part.entry = order.units;
    }
    int64_t end = 0;
    uint32_t number = 0;
    for (Order::Item& item : all[k]) {
      const Job& job = *item.job;
      item.number = number++, item.fast = k != kAny;
      item.end = end += walked(job, walk, k);
      item.matrix_end = order.matrices += finalize_parts(job);
      if (walk == Walk::kUpdate) {
        item.first_unit = part.units, item.entry = part.entry + part.units;
        item.units = ceil_div(walked(job, walk, k), part.group);
        part.units += item.units;
      }
      order.items.push_back(item);
    }
    order.units += part.units;
    if (part.units > 0) {
      const int64_t wanted = ceil_div(part.units, k == kAny ? kAnyWarps : kFastWarps);
      part.blocks = wanted < part.blocks ? wanted : part.blocks;
    }
  }
  return order.units < int64_t{1} << 31 ? nullptr : "more tiles than a step on a GPU can count";
}

}  // namespace lowbit::cuda
