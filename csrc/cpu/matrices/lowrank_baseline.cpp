#define LOWBIT_ISA "baseline"
#define LOWBIT_LOWRANK kLowRankBaseline
#include "cpu/matrices/lowrank_kernels.inl"
