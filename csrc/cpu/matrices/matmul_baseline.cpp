#define LOWBIT_ISA "baseline"
#define LOWBIT_MATMUL kMatmulBaseline
#include "cpu/matrices/matmul_kernels.inl"
