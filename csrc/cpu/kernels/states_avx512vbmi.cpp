#define LOWBIT_STATES kStatesAvx512Vbmi
#include "cpu/kernels/states.inl"
