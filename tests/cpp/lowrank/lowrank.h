// What the tests of the low-rank parts share: drawn values, and the words of an exact sum.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/exact_sum.h"

/// One engine for all of them: what a check draws follows from the order of the checks.
inline std::mt19937 random_engine(20240229);
inline uint32_t draw32() { return static_cast<uint32_t>(random_engine()); }

struct Words {
  int64_t word[lowbit::ExactSum::kWords] = {};
  void carry() { lowbit::exact_carry(word); }
  double value() const { return lowbit::exact_value(word); }
  bool operator==(const Words& other) const {
    return std::memcmp(word, other.word, sizeof word) == 0;
  }
};

inline std::vector<float> normals(int64_t n, float scale) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(random_engine) * scale;
  return x;
}

inline bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * 4) == 0;
}

// Each checks the kernels in use, those of `isa`. What `first` holds are the bits of the first
// instruction set; the others have the same.
void check_exact_sums();
void check_sums(const std::string& isa);
void check_trajectories(const std::string& isa, std::vector<std::vector<float>>& first);
void check_subspace(const std::string& isa, std::vector<std::vector<float>>& first);
