#define LOWBIT_ISA "baseline"
#define LOWBIT_LOWRANK kLowRankBaseline
#include "cpu/lowrank_kernels.inl"
