// The CUDA library, `_cuda.so` in the folder of this library, opened on first use. Without it, or
// without a GPU, everything but CUDA works.
#pragma once

#include <cstdint>

#include "cuda/abi.h"
#include "cuda/muon_abi.h"

namespace lowbit::cuda {

struct Library {
  const char* error;  // null, or why CUDA is not usable and what to do
  CudaPlanFn plan;
  CudaDiscardFn discard;
  CudaRetainFn retain;
  CudaStepFn step;
  CudaCodeFn quantize, dequantize;
  CudaAccumulateFn accumulate;
  CudaMeansFn means;
  CudaAllocateFn allocate;
  CudaFreeFn free;
  CudaPrefetchFn prefetch;
  CudaLowRankFn lowrank;
  CudaNewtonSchulzFn newton_schulz;
  CudaRowMomentsFn row_moments;
  CudaProductFn product;
  /// The current stream of torch on the device. Throws if torch has none.
  void* (*current_stream)(int device);
};

const Library& library();

}  // namespace lowbit::cuda
