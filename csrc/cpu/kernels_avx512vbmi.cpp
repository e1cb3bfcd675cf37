#define LOWBIT_ISA "avx512vbmi"
#define LOWBIT_KERNELS kKernelsAvx512Vbmi
#include "cpu/kernels.inl"
