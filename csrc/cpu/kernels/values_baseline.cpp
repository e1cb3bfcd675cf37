#define LOWBIT_VALUES kValuesBaseline
#include "cpu/kernels/values.inl"
