// Low-rank steps on a GPU, with the bits of cpu/matrices/lowrank.cpp: a table of matrices, filled
// on the device, and the work that is done once per matrix.
//
// A kernel walks over the units of many matrices, as step.cuh does over tiles. The unit depends on
// the pass. The launcher (lowrank.cu) and the kernel share the functions that count the units of a
// job.
#pragma once

#include "core/lowrank/fixed.h"
#include "core/lowrank/limiter.h"
#include "cuda/abi.h"
#include "cuda/warp_sum.cuh"

namespace lowbit::cuda {

constexpr int kLowRankWarps = 8, kLowRankThreads = kLowRankWarps * kLanes;
enum LowRankSum { kSquaresOfN, kSquaresOfLow, kSquaresOfUpdate };  // LowRankJob::words

/// The matrices of one launch.
struct LowRankBatch {
  static constexpr int kMany = 64;
  const LowRankJob* jobs;
  const float* found_inf;  // or null
  int64_t units;
  int count;
  int64_t ends[kMany];  // units of jobs 0..i

  __device__ __forceinline__ bool skipped() const {
    return found_inf != nullptr && *found_inf != 0.0f;
  }
};

/// The job of a unit, and the index of the unit in it.
struct LowRankUnit {
  int64_t job, number;
};
__device__ __forceinline__ LowRankUnit unit_at(const LowRankBatch& batch, int64_t unit, int lane) {
  const int64_t job = find_job(batch, unit, lane);
  return {job, unit - (job > 0 ? batch.ends[job - 1] : 0)};
}

/// The number of tiles of kTile columns in a row.
LB_HD int64_t row_tiles(const LowRankJob& job) { return ceil_div(job.cols, kTile); }

/// One element of a gradient, scaled.
template <class G>
__device__ __forceinline__ float grad_at(const LowRankJob& job, int64_t at) {
  return G::load(static_cast<const typename G::Storage*>(job.grad)[at]) * job.g_scale;
}

__device__ __forceinline__ float scale_at(const LowRankJob& job, int64_t row, int64_t col) {
  return job.scales[job.by_tensor ? 0 : job.tall ? row : col];
}

// ---- the table ----

/// Jobs by value: a captured graph has its own copy. Kernel arguments are limited to 32764 bytes.
struct LowRankTable {
  LowRankJob* jobs;
  const float *grad_scale, *found_inf;  // or null
  int count;
  LowRankJob job[LowRankBatch::kMany];
};
static_assert(sizeof(LowRankTable) <= 32764);

/// Writes the table and the constants of each matrix, in double. One block of threads.
__global__ void __launch_bounds__(LowRankBatch::kMany)
    prepare_lowrank(LB_ARGUMENT(LowRankTable) call) {
  static_assert(sizeof(LowRankJob) % sizeof(Word) == 0);
  constexpr int kWords = static_cast<int>(sizeof(LowRankJob) / sizeof(Word));
  if (call.found_inf != nullptr && *call.found_inf != 0.0f) return;
  const int thread = static_cast<int>(threadIdx.x);
  const auto* from = reinterpret_cast<const Word*>(call.job);
  auto* to = reinterpret_cast<Word*>(call.jobs);
  LB_UNROLL(1)
  for (int w = thread; w < call.count * kWords; w += LowRankBatch::kMany) to[w] = from[w];
  __syncthreads();
  if (thread >= call.count) return;
  LowRankJob& job = call.jobs[thread];
  const int64_t t = llrintf(*job.step) + 1;
  const double lr = job.lr != nullptr ? static_cast<double>(*job.lr) : job.hyper[0];
  const double scale = call.grad_scale != nullptr ? static_cast<double>(*call.grad_scale) : 1.0;
  job.g_scale = static_cast<float>((job.maximize ? -1.0 : 1.0) / scale);
  job.write = lr != 0.0;
  Scaling c;
  c.front = static_cast<float>(job.hyper[4]);
  c.after = static_cast<float>(job.hyper[5]);
  c.alpha = static_cast<float>(job.hyper[6]);
  c.eta = static_cast<float>(bias_corrected(lr, job.hyper[1], job.hyper[2], t));
  c.decay = static_cast<float>(lr * job.hyper[3]);
  job.scaling = c;
  job.random = random_key(job.seed, static_cast<uint32_t>(t), job.stream);
  if (job.draws)
    job.projection =
        projection_key(job.seed, static_cast<uint32_t>((t - 1) / job.gap), job.stream, job.rank);
}

// ---- the projection ----

/// The number of Philox calls, four entries each, in groups of 32 for the lanes of a warp.
LB_HD int64_t draw_units(const LowRankJob& job) {
  const int64_t begin = job.p_first * job.rank, end = begin + job.p_rows() * job.rank;
  return job.draws && end > begin ? ceil_div(ceil_div(end, 4) - begin / 4, kLanes) : 0;
}

__global__ void __launch_bounds__(kLowRankThreads)
    draw_projection(LB_ARGUMENT(LowRankBatch) batch) {
  if (batch.skipped()) return;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  LB_UNROLL(1)
  for (int64_t i = warp_number<kLowRankWarps>(thread); i < batch.units;
       i += warps<kLowRankWarps>()) {
    const LowRankUnit unit = unit_at(batch, i, lane);
    const LowRankJob job = batch.jobs[unit.job];
    const int64_t begin = job.p_first * job.rank, end = begin + job.p_rows() * job.rank;
    const int64_t group = begin / 4 + unit.number * kLanes + lane;
    Random8 r = random8(job.projection.key, static_cast<uint64_t>(group));
    LB_UNROLL(1)
    for (int64_t e = 4 * group; e < 4 * group + 4; ++e) {
      if (e >= begin && e < end)
        job.p[e - begin] = static_cast<float>(normal(r.word[0]) * job.projection.scale);
      r.word[0] = r.word[1], r.word[1] = r.word[2], r.word[2] = r.word[3];
    }
  }
}

// ---- results of the sums ----

enum class LowRankFinalize { kScale, kLimit };
struct LowRankDigits {
  int64_t digit[LowRankBatch::kMany][ExactSum::kWords];
};

/// One block of threads, with one thread per matrix: computes the scale of the whole tensor, or the
/// divisor of the limiter.
__global__ void __launch_bounds__(LowRankBatch::kMany)
    finalize_lowrank(LB_ARGUMENT(LowRankBatch) batch, LowRankJob* jobs,
                     const LowRankFinalize what) {
  LB_SHARED(LowRankDigits, shared);
  if (batch.skipped()) return;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= batch.count) return;
  LowRankJob& job = jobs[thread];
  int64_t* digit = shared.digit[thread];
  const auto sum = [&](LowRankSum which) {
    return exact_value(job.words + which * ExactSum::kWords, digit);
  };
  if (what == LowRankFinalize::kScale && job.by_tensor) {
    const double of_n = sum(kSquaresOfN);
    *job.scales = canonical(norm_ratio(of_n, sum(kSquaresOfLow)));
  }
  if (what == LowRankFinalize::kLimit && job.limits) {
    double state = static_cast<double>(*job.norm);
    const double divisor = Limiter{job.gamma}.divisor(__builtin_sqrt(sum(kSquaresOfUpdate)), state);
    *job.norm = static_cast<float>(state);
    job.scaling.divisor = static_cast<float>(divisor);
  }
}

}  // namespace lowbit::cuda
