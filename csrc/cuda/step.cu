// The launcher: which kernel serves which job, and the C interface of abi.h. Host code, compiled
// with the kernels.
#include <cstdio>
#include <vector>

#include "cuda/abi.h"
#include "cuda/code.cuh"
#include "cuda/step.cuh"

namespace lowbit::cuda {
namespace {

/// A sentence about a failed call, for the caller's thread; null where it did not fail.
const char* explain(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return nullptr;
  const char* hint = "";
  if (error == cudaErrorNoKernelImageForDevice) {
    hint =
        "; lowbit was not built for this GPU's architecture: build again with it in "
        "LOWBIT_CUDA_ARCHS";
  } else if (error == cudaErrorInsufficientDriver) {
    hint =
        "; there is no driver, or one older than the CUDA toolkit that lowbit was built with: "
        "update it, or build with an older toolkit";
  }
  static thread_local char text[512];
  std::snprintf(text, sizeof text, "%s while %s%s", cudaGetErrorString(error), doing, hint);
  return text;
}

template <class F, class... Fs>
constexpr int index_of(Types<Fs...>) {
  int i = 0, found = -1;
  ((found = __is_same(F, Fs) ? i : found, ++i), ...);
  return found;
}

/// A kernel with fixed formats. The popular ones; all else goes to step_any.
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
    // embeddings, heads, norms: state kept wide
    fast<BFloat16Stochastic, BFloat16Grad, Float32State, Float32State>(),
    fast<Float32Param, Float32Grad, Float32State, Float32State>(),
};
constexpr int kFastCount = sizeof(kFast) / sizeof(kFast[0]), kAny = kFastCount;

bool aligned(const void* p, int bytes) {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0;
}

/// Whether a lane's 8 values are always all there, aligned for 16-byte accesses, inside one block
/// and one Philox group.
bool by_eights(const Job& job) {
  if (job.cols % 8 != 0 || job.global_cols % 8 != 0 || job.first % 8 != 0 ||
      !aligned(job.param, 16) || !aligned(job.grad, 16))
    return false;
  for (int k = 0; k < 2; ++k) {
    if (!aligned(job.state[k].values, 16) ||
        (job.state[k].scales != nullptr && job.state[k].block < 8))
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

template <class... Expected, class... Given>
const char* launch(void (*kernel)(Expected...), int64_t blocks, int threads, void* stream,
                   const char* name, const Given&... given) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  return explain(cudaLaunchKernelEx(&config, kernel, given...), name);
}

/// Blocks for so many tiles: no more than the device holds at once, each then walks over many
/// tiles.
template <class Kernel>
cudaError_t grid(int device, Kernel kernel, int64_t tiles, int warps, int64_t* blocks) {
  int processors = 0, each = 0;
  cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, warps * kLanes, 0);
  const int64_t most = static_cast<int64_t>(processors) * (each > 0 ? each : 1),
                wanted = ceil_div(tiles, warps);
  *blocks = wanted < most ? wanted : most;
  return error;
}

/// Loads every kernel onto the device once, so that none is loaded while a graph is captured.
const char* load_kernels(int device) {
  static thread_local uint64_t loaded = 0;
  if (device < 64 && (loaded >> device & 1)) return nullptr;
  cudaFuncAttributes attributes;
  const auto load = [&](auto kernel) {
    return explain(cudaFuncGetAttributes(&attributes, kernel), "loading lowbit's kernels");
  };
  for (const Fast& f : kFast) {
    if (const char* error = load(f.kernel)) return error;
  }
  for (const char* error : {load(step_any), load(prepare), load(code<true>), load(code<false>)}) {
    if (error) return error;
  }
  if (device < 64) loaded |= uint64_t{1} << device;
  return nullptr;
}

const char* begin(int device) {
  if (const char* error = explain(cudaSetDevice(device), "choosing the device")) return error;
  return load_kernels(device);
}

int64_t ends_offset(int64_t count) { return count * static_cast<int64_t>(sizeof(Job)); }

/// Writes the job table and steps; `order` is the jobs' order in the workspace, `ends` their
/// running tiles within a kernel's batch.
const char* launch_prepare(const CudaStep& call, Job* jobs, int64_t* ends,
                           const std::vector<int64_t>& order,
                           const std::vector<int64_t>& order_ends) {
  std::vector<Prepare> chunk(1);  // too large for some stacks
  Prepare& p = chunk[0];
  p.lr = call.lr;
  p.grad_scale = call.grad_scale;
  p.found_inf = call.found_inf;
  p.maximize = call.maximize;
  for (int k = 0; k < call.hypers; ++k) p.hyper[k] = call.hyper[k];
  for (int64_t at = 0; at < call.count; at += Prepare::kJobs) {
    p.count = static_cast<int>(call.count - at < Prepare::kJobs ? call.count - at : Prepare::kJobs);
    p.jobs = jobs + at;
    p.ends = ends + at;
    for (int i = 0; i < p.count; ++i) {
      const int64_t from = order[at + i];
      p.item[i] = {call.jobs[from], order_ends[at + i], call.steps[from]};
    }
    if (const char* error = launch(prepare, 1, 128, call.stream, "launching prepare", p))
      return error;
  }
  return nullptr;
}

const char* run(const CudaStep& call) {
  if (call.count == 0) return nullptr;
  if (call.hypers > kMostHypers) return "more hyperparameters than any rule takes";
  if (const char* error = begin(call.device)) return error;

  std::vector<int> kernels(call.count);
  for (int64_t i = 0; i < call.count; ++i) kernels[i] = kernel_of(call.jobs[i]);
  std::vector<int64_t> order, ends;  // jobs kernel by kernel, and their running tiles
  struct Part {
    int64_t begin, count, tiles;
  } parts[kFastCount + 1];
  for (int k = 0; k <= kAny; ++k) {
    Part& part = parts[k] = {static_cast<int64_t>(order.size()), 0, 0};
    for (int64_t i = 0; i < call.count; ++i) {
      if (kernels[i] != k) continue;
      order.push_back(i);
      ends.push_back(part.tiles += call.jobs[i].tiles());
      ++part.count;
    }
  }
  auto* jobs = static_cast<Job*>(call.workspace);
  auto* device_ends =
      reinterpret_cast<int64_t*>(static_cast<char*>(call.workspace) + ends_offset(call.count));
  if (const char* error = launch_prepare(call, jobs, device_ends, order, ends)) return error;

  for (int k = 0; k <= kAny; ++k) {
    const Part& part = parts[k];
    if (part.tiles == 0) continue;
    const int warps = k == kAny ? kAnyWarps : kFastWarps;
    void (*kernel)(Batch) = k == kAny ? step_any : kFast[k].kernel;
    int64_t blocks = 0;
    if (const char* error = explain(grid(call.device, kernel, part.tiles, warps, &blocks),
                                    "asking for the device's size"))
      return error;
    const Batch batch{jobs + part.begin, device_ends + part.begin, part.count, part.tiles,
                      call.found_inf};
    if (const char* error =
            launch(kernel, blocks, warps * kLanes, call.stream, "launching the step", batch))
      return error;
  }
  return nullptr;
}

template <bool kEncode>
const char* run_code(const CudaCode& call) {
  const int64_t tiles = call.rows * ceil_div(call.cols, kTile);
  if (tiles == 0) return nullptr;
  if (const char* error = begin(call.device)) return error;
  int64_t blocks = 0;
  if (const char* error = explain(grid(call.device, code<kEncode>, tiles, kAnyWarps, &blocks),
                                  "asking for the device's size"))
    return error;
  return launch(code<kEncode>, blocks, kAnyWarps * kLanes, call.stream,
                kEncode ? "launching encode" : "launching decode", call);
}

}  // namespace
}  // namespace lowbit::cuda

#define LB_EXPORT extern "C" __attribute__((visibility("default")))

LB_EXPORT int lowbit_cuda_abi() { return lowbit::kCudaAbi; }

/// Bytes: the jobs, then the running sum of their tiles.
LB_EXPORT int64_t lowbit_cuda_workspace(int64_t count) {
  return lowbit::cuda::ends_offset(count) + count * static_cast<int64_t>(sizeof(int64_t));
}

LB_EXPORT const char* lowbit_cuda_step(const lowbit::CudaStep* call) {
  return lowbit::cuda::run(*call);
}
LB_EXPORT const char* lowbit_cuda_encode(const lowbit::CudaCode* call) {
  return lowbit::cuda::run_code<true>(*call);
}
LB_EXPORT const char* lowbit_cuda_decode(const lowbit::CudaCode* call) {
  return lowbit::cuda::run_code<false>(*call);
}
