// Errors of the CUDA runtime as the sentences that abi.h returns.
#pragma once

#include <cstdio>

namespace lowbit::cuda {

/// A sentence about a failed call, in a buffer of the calling thread, or null if it succeeded.
inline const char* explain(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return nullptr;
  const char* hint = "";
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    hint =
        "; lowbit was not built for this GPU's architecture: build again with it in "
        "LOWBIT_CUDA_ARCHS, or, if its compute capability is below 8.0, which has no kernels, keep "
        "its parameters on the CPU";
  } else if (error == cudaErrorUnsupportedPtxVersion) {
    hint =
        "; this GPU compiles lowbit's PTX, which is newer than its driver: update the driver, or "
        "build again with the GPU's architecture in LOWBIT_CUDA_ARCHS";
  } else if (error == cudaErrorInsufficientDriver) {
    hint =
        "; there is no driver, or one older than the CUDA toolkit that lowbit was built with: "
        "update it, or build with an older toolkit";
  }
  static thread_local char text[512];
  std::snprintf(text, sizeof text, "%s while %s%s", cudaGetErrorString(error), doing, hint);
  return text;
}

}  // namespace lowbit::cuda
