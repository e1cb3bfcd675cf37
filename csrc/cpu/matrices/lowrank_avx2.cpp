#define LOWBIT_ISA "avx2"
#define LOWBIT_LOWRANK kLowRankAvx2
#include "cpu/matrices/lowrank_kernels.inl"
