// What every function of core is compiled as: always inlined, so that a leaf inside an AVX-512
// object is AVX-512 code and no per-ISA object emits a weak symbol that the linker could pick for
// another machine; and callable from a CUDA kernel.
#pragma once

#if defined(__CUDACC__)
#define LB_HD __host__ __device__ __forceinline__
#else
#define LB_HD inline __attribute__((always_inline))
#endif
