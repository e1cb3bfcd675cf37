#define LOWBIT_VALUES kValuesAvx512
#include "cpu/kernels/values.inl"
