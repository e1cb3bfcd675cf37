#define LOWBIT_RULES kRulesBaseline
#include "cpu/kernels/rules.inl"
