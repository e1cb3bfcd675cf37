#define LOWBIT_STATES kStatesAvx2
#include "cpu/kernels/states.inl"
