#define LOWBIT_ISA "avx2"
#define LOWBIT_LEAVES kLeavesAvx2
#include "cpu/leaves.inl"
