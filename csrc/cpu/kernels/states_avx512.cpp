#define LOWBIT_STATES kStatesAvx512
#include "cpu/kernels/states.inl"
