#define LOWBIT_ISA "avx512"
#define LOWBIT_MATMUL kMatmulAvx512
#include "cpu/matrices/matmul_kernels.inl"
