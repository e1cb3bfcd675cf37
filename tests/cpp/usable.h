// Whether this processor can run the instruction set that a test was compiled for.
#pragma once

inline bool usable() {
#if defined(__AVX512VBMI__)
  return __builtin_cpu_supports("avx512vbmi");
#elif defined(__AVX512F__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return true;
#endif
}
