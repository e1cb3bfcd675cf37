// The launcher of low-rank steps: the kernels of each pass. Host code, compiled with the kernels.
#include <algorithm>
#include <vector>

#include "cuda/abi.h"
#include "cuda/launch.h"
#include "cuda/matrices/lowrank_columns.cuh"
#include "cuda/matrices/lowrank_product.cuh"

namespace lowbit::cuda {
namespace {

/// Up to kMany matrices of one call, processed together.
struct Chunk {
  const CudaLowRank& call;
  const LowRankJob* jobs;  // host
  LowRankJob* table;       // device
  int count;
};

LowRankBatch batch_of(const Chunk& chunk) {
  LowRankBatch batch{};
  batch.jobs = chunk.table;
  batch.found_inf = chunk.call.found_inf;
  batch.count = chunk.count;
  return batch;
}

/// Launches a kernel over the units of a chunk. A block of threads processes `together` units at
/// once.
template <class Kernel, class Units>
const char* walk(const Chunk& chunk, Kernel kernel, const Units& units, int threads, int together,
                 const char* name) {
  LowRankBatch batch = batch_of(chunk);
  for (int i = 0; i < batch.count; ++i) batch.ends[i] = batch.units += units(chunk.jobs[i]);
  if (batch.units == 0) return nullptr;
  const int warps = threads / kLanes;
  int64_t blocks = 0;
  if (const char* error =
          explain(grid(chunk.call.device, kernel, batch.units * (warps / together), warps, &blocks),
                  "asking for the device's size"))
    return error;
  return launch(kernel, blocks, threads, chunk.call.stream, name, batch);
}
template <class Kernel, class Units>
const char* by_warps(const Chunk& chunk, Kernel kernel, const Units& units, const char* name) {
  return walk(chunk, kernel, units, kLowRankThreads, kLowRankWarps, name);
}
template <Product kWhat>
const char* multiply(const Chunk& chunk, const char* name) {
  return walk(chunk, lowrank_product<kWhat>, product_units<kWhat>, kProductThreads, 1, name);
}

const char* prepare(const Chunk& chunk) {
  std::vector<LowRankTable> table(1);  // on the heap: too large for some stacks
  table[0].jobs = chunk.table;
  table[0].grad_scale = chunk.call.grad_scale;
  table[0].found_inf = chunk.call.found_inf;
  table[0].count = chunk.count;
  std::copy_n(chunk.jobs, chunk.count, table[0].job);
  return launch(prepare_lowrank, 1, LowRankBatch::kMany, chunk.call.stream,
                "launching prepare_lowrank", table[0]);
}

const char* finalize(const Chunk& chunk, LowRankFinalize what, bool LowRankJob::* wanted) {
  if (std::none_of(chunk.jobs, chunk.jobs + chunk.count,
                   [&](const LowRankJob& job) { return job.*wanted; }))
    return nullptr;
  return launch(finalize_lowrank, 1, LowRankBatch::kMany, chunk.call.stream,
                "launching finalize_lowrank", batch_of(chunk), chunk.table, what);
}

/// Launches the kernels of a pass in order. Returns the sentence of the first one that failed.
const char* run_pass(const Chunk& chunk) {
  const char* error = nullptr;
  const auto each = [&](auto... launches) { ((error = error ? error : launches()), ...); };
  switch (chunk.call.pass) {
    case LowRankPass::kProject:
      each([&] { return prepare(chunk); },
           [&] { return by_warps(chunk, draw_projection, draw_units, "drawing projections"); },
           [&] { return multiply<Product::kLow>(chunk, "projecting rows"); },
           [&] {
             return walk(chunk, lowrank_narrow, narrow_units, kNarrowWarps * kLanes, kNarrowWarps,
                         "projecting rows");
           },
           [&] { return by_warps(chunk, lowrank_absmax, absmax_units, "measuring columns"); });
      break;
    case LowRankPass::kSumColumns:
      each([&] {
        return walk(chunk, lowrank_columns, sum_units, kSumThreads, 1, "projecting columns");
      });
      break;
    case LowRankPass::kValues:
      each([&] { return by_warps(chunk, lowrank_values, value_units, "reading sums"); });
      break;
    case LowRankPass::kMeasure:
      each([&] { return by_warps(chunk, lowrank_channels, channel_units, "scaling channels"); },
           [&] { return by_warps(chunk, lowrank_squares, square_units, "summing squares"); });
      break;
    case LowRankPass::kNorm:
      each([&] { return finalize(chunk, LowRankFinalize::kScale, &LowRankJob::by_tensor); },
           [&] { return by_warps(chunk, lowrank_norm, norm_units, "measuring updates"); },
           [&] { return multiply<Product::kResidual>(chunk, "measuring residuals"); });
      break;
    case LowRankPass::kApply:
      each([&] { return finalize(chunk, LowRankFinalize::kLimit, &LowRankJob::limits); },
           [&] { return by_warps(chunk, lowrank_step, step_units, "stepping matrices"); },
           [&] { return multiply<Product::kStep>(chunk, "stepping matrices"); });
      break;
  }
  return error;
}

const char* run_lowrank(const CudaLowRank& call) {
  static thread_local uint64_t loaded = 0;
  if (const char* error =
          begin(call.device, loaded, prepare_lowrank, draw_projection, finalize_lowrank,
                lowrank_absmax, lowrank_columns, lowrank_values, lowrank_channels, lowrank_squares,
                lowrank_norm, lowrank_step, lowrank_narrow, lowrank_product<Product::kLow>,
                lowrank_product<Product::kResidual>, lowrank_product<Product::kStep>))
    return error;
  for (int64_t at = 0; at < call.count; at += LowRankBatch::kMany) {
    const int64_t left = call.count - at;
    const Chunk chunk{call, call.jobs + at, call.table + at,
                      static_cast<int>(left < LowRankBatch::kMany ? left : LowRankBatch::kMany)};
    if (const char* error = run_pass(chunk)) return error;
  }
  return nullptr;
}

}  // namespace
}  // namespace lowbit::cuda

extern "C" __attribute__((visibility("default"))) const char* lowbit_cuda_lowrank(
    const lowbit::CudaLowRank* call) {
  return lowbit::cuda::run_lowrank(*call);
}
