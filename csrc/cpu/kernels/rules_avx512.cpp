#define LOWBIT_RULES kRulesAvx512
#include "cpu/kernels/rules.inl"
