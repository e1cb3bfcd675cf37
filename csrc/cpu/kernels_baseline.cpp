#define LOWBIT_ISA "baseline"
#define LOWBIT_KERNELS kKernelsBaseline
#include "cpu/kernels.inl"
