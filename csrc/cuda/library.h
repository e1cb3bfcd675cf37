// The CUDA library, opened on first use: `_cuda.so` beside this one. A machine without it, or
// without a GPU, loses nothing but CUDA.
#pragma once

#include <cstdint>

#include "cuda/abi.h"

namespace lowbit::cuda {

struct Library {
  const char* error;  // null, or why CUDA cannot be used and what to do
  CudaWorkspaceFn workspace;
  CudaStepFn step;
  CudaCodeFn encode, decode;
  CudaAccumulateFn accumulate;
  CudaAllocateFn allocate;
  CudaFreeFn free;
  CudaPrefetchFn prefetch;
  CudaLowRankFn lowrank;
  /// torch's current stream on the device.
  void* (*current_stream)(int device);
};

const Library& library();

}  // namespace lowbit::cuda
