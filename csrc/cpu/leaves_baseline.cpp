#define LOWBIT_ISA "baseline"
#define LOWBIT_LEAVES kLeavesBaseline
#include "cpu/leaves.inl"
