// Whether this processor can run the instruction set that a test was compiled for.
#pragma once

#include <cstdio>

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

/// The tests of a file, and their exit status. Not a part of main: a sanitizer marks the stack of a
/// function on entry, in the instruction set of the file, before that function asks anything.
[[gnu::noipa]] int run_tests();

int main() {
  if (usable()) return run_tests();
  std::printf("0 passed, 0 failed: not this processor's instruction set\n");
  return 0;
}
