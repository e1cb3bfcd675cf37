#define LOWBIT_ISA "avx512"
#define LOWBIT_LOWRANK kLowRankAvx512
#include "cpu/matrices/lowrank_kernels.inl"
