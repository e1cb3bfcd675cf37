#define LOWBIT_STATES kStatesBaseline
#include "cpu/kernels/states.inl"
