#define LOWBIT_ISA "avx512"
#define LOWBIT_KERNELS kKernelsAvx512
#include "cpu/kernels.inl"
