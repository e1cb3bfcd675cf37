#define LOWBIT_ISA "avx512vbmi"
#define LOWBIT_LEAVES kLeavesAvx512Vbmi
#include "cpu/leaves.inl"
