#define LOWBIT_ISA "avx2"
#define LOWBIT_MATMUL kMatmulAvx2
#include "cpu/matrices/matmul_kernels.inl"
