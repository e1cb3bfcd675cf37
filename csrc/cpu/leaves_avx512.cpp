#define LOWBIT_ISA "avx512"
#define LOWBIT_LEAVES kLeavesAvx512
#include "cpu/leaves.inl"
