#define LOWBIT_VALUES kValuesAvx2
#include "cpu/kernels/values.inl"
