#define LOWBIT_ISA "baseline"
#define LOWBIT_MATMUL kMatmulBaseline
#include "cpu/matmul_kernels.inl"
