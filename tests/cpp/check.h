// What a C++ test counts and prints, and its exit status.
#pragma once

#include <cstdio>
#include <string>

inline int passed = 0, failed = 0;

/// Counts a check. Prints the first failures only: a wrong kernel fails in every element.
inline void check(bool good, const std::string& what) {
  good ? ++passed : ++failed;
  if (!good && failed <= 40) std::printf("FAILED: %s\n", what.c_str());
}

/// Prints the counts. Returns the exit status of the program: a test without a check has failed.
inline int finish() {
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed > 0 || passed == 0 ? 1 : 0;
}
