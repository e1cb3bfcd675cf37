#define LOWBIT_ISA "avx2"
#define LOWBIT_KERNELS kKernelsAvx2
#include "cpu/kernels.inl"
