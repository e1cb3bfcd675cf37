#define LOWBIT_RULES kRulesAvx2
#include "cpu/kernels/rules.inl"
