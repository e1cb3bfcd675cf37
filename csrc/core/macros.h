// LB_HD, the attributes of every function of core. Functions are always inlined: a kernel inside an
// AVX-512 object is AVX-512 code, and no per-ISA object emits a weak symbol that the linker could
// pick for another machine. They are also callable from CUDA kernels.
#pragma once

#if defined(__CUDACC__)
#define LB_HD __host__ __device__ __forceinline__
#else
#define LB_HD inline __attribute__((always_inline))
#endif

// The same for lambdas, after their parameters.
#define LB_LAMBDA __attribute__((always_inline))
