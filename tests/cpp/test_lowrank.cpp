// The low-rank parts: exact sums, the projection, the products, scaling, limiter and subspace.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/exact_sum.h"

namespace {

using namespace lowbit;

int passed = 0, failed = 0;

void check(bool good, const std::string& what) {
  good ? ++passed : ++failed;
  if (!good && failed <= 20) std::printf("FAILED: %s\n", what.c_str());
}

std::mt19937 random_engine(20240229);
uint32_t draw32() { return static_cast<uint32_t>(random_engine()); }

struct Words {
  int64_t word[ExactSum::kWords] = {};
  void carry() { exact_carry(word); }
  double value() const { return exact_value(word); }
  bool operator==(const Words& other) const {
    return std::memcmp(word, other.word, sizeof word) == 0;
  }
};

/// Sums whose terms are multiples of 2^-40 below 2^40, against 128-bit integers.
void check_values() {
  for (int round = 0; round < 2000; ++round) {
    Words w;
    __int128 sum = 0;
    const int n = 1 + static_cast<int>(draw32() % 300);
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) {
      v = std::ldexp(static_cast<float>(draw32() & 0xffffff), static_cast<int>(draw32() % 56) - 40);
      if (draw32() & 1) v = -v;
      if (round % 3 == 0) v = std::fabs(v);
      sum += static_cast<__int128>(std::ldexp(static_cast<double>(v), 40));
    }
    if (round % 5 == 0) {  // nearly all cancels
      for (int i = 1; i < n; ++i) {
        exact_add(-x[static_cast<size_t>(i)], w.word);
        sum -=
            static_cast<__int128>(std::ldexp(static_cast<double>(x[static_cast<size_t>(i)]), 40));
      }
    }
    for (const float v : x) exact_add(v, w.word);
    check(w.value() == std::ldexp(static_cast<double>(sum), -40), "exact_value");
    Words carried = w;
    carried.carry();
    check(carried.value() == w.value(), "exact_value of canonical words");
  }
  Words w;
  for (int i = 0; i < 1000; ++i) exact_add(3.4028234663852886e38f, w.word);
  check(w.value() == 1000.0 * 3.4028234663852886e38, "the largest floats");
  exact_add(0x1p-149f, w.word);
  for (int i = 0; i < 1000; ++i) exact_add(-3.4028234663852886e38f, w.word);
  check(w.value() == 0x1p-149, "the least float is not lost");
  exact_add(-0x1p-149f, w.word);
  check(w.value() == 0.0, "zero");
  exact_add(-0x1p-149f, w.word);
  check(w.value() == -0x1p-149, "below zero");
  exact_add(INFINITY, w.word);
  exact_add(NAN, w.word);
  check(std::isnan(w.value()) && w.word[ExactSum::kNonFinite] == 2, "not finite");
}

/// Any bits, in any order, in parts that are carried and merged.
void check_orders() {
  for (int round = 0; round < 300; ++round) {
    const int n = 1 + static_cast<int>(draw32() % 1500), spread = round % 4;
    std::vector<float> x(static_cast<size_t>(n));
    for (float& v : x) {
      const uint32_t bits = draw32();
      v = bits_float(spread == 0   ? bits
                     : spread == 1 ? bits % 0x7f800000u
                     : spread == 2 ? bits % 0x01800000u | (bits & 0x80000000u)
                                   : 0x30000000u + bits % 0x10000000u);
    }
    Words one, many;
    for (const float v : x) exact_add(v, one.word);
    one.carry();
    for (int at = 0; at < n;) {
      const int part = std::min(n - at, 1 + static_cast<int>(draw32() % 600));
      Words w;
      exact_add(&x[static_cast<size_t>(at)], part, w.word);
      w.carry();
      exact_merge(w.word, many.word);
      at += part;
    }
    many.carry();
    check(one == many, "parts of a sum");
  }
}

}  // namespace

int main() {
  check_values();
  check_orders();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
