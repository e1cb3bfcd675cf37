// Host code shared by the launchers of kernels.
#pragma once

#include <cstdint>

#include "cuda/explain.h"
#include "cuda/warp.cuh"

namespace lowbit::cuda {

template <class... Expected, class... Given>
const char* launch(void (*kernel)(Expected...), int64_t blocks, int threads, void* stream,
                   const char* name, const Given&... given) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, given...);
  // Said here, and cleared: torch's next check would say it of another kernel.
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return explain(error, name);
}

/// The number of blocks that the device runs at once.
template <class Kernel>
cudaError_t max_blocks(int device, Kernel kernel, int warps, int64_t* blocks) {
  int processors = 0, each = 0;
  cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, warps * kLanes, 0);
  *blocks = static_cast<int64_t>(processors) * (each > 0 ? each : 1);
  return error;
}

/// The number of blocks for a number of tiles: at most as many as the device runs at once, each of
/// which then walks over many tiles.
template <class Kernel>
cudaError_t grid(int device, Kernel kernel, int64_t tiles, int warps, int64_t* blocks) {
  const cudaError_t error = max_blocks(device, kernel, warps, blocks);
  const int64_t wanted = ceil_div(tiles, warps);
  if (wanted < *blocks) *blocks = wanted;
  return error;
}

/// Selects the device, and loads kernels onto it once, so that none is loaded during graph capture.
/// loaded: one bit per device. Kernels may be null.
template <class... Kernel>
const char* begin(int device, uint64_t& loaded, Kernel... kernels) {
  if (const char* error = explain(cudaSetDevice(device), "choosing the device")) return error;
  if (device < 64 && (loaded >> device & 1)) return nullptr;
  cudaFuncAttributes attributes;
  cudaError_t error = cudaSuccess;
  const auto load = [&](auto kernel) {
    if (kernel != nullptr && error == cudaSuccess)
      error = cudaFuncGetAttributes(&attributes, kernel);
  };
  (load(kernels), ...);
  if (error == cudaSuccess && device < 64) loaded |= uint64_t{1} << device;
  return explain(error, "loading lowbit's kernels");
}

}  // namespace lowbit::cuda
