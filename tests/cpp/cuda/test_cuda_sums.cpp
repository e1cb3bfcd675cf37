// Sums that lanes keep in registers (cuda/step/lane_sums.cuh) against core's exact sum, term by
// term.
#include "cuda_emulator.h"

// after the emulator
#include <cmath>
#include <vector>

#include "check.h"
#include "cuda/step/lane_sums.cuh"

namespace lowbit {
namespace {

using cuda::kEach;
constexpr int kRows = 32, kCols = cuda::kLanes * kEach;

/// Numbers that repeat.
struct Numbers {
  uint64_t state = 88172645463325252u;
  uint32_t next() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<uint32_t>(state >> 16);
  }
  /// A float that is not negative, with an exponent field in [low, high).
  float between(uint32_t low, uint32_t high) {
    return bits_float((next() & 0x7fffffu) | (low + next() % (high - low)) << 23);
  }
};

struct Sums {
  std::vector<int64_t> columns = std::vector<int64_t>(kCols * ExactSum::kWords);
  std::vector<int64_t> rows = std::vector<int64_t>(kRows * ExactSum::kWords);
  std::vector<int64_t> total = std::vector<int64_t>(ExactSum::kWords);
  std::vector<int64_t> also = std::vector<int64_t>(ExactSum::kWords);

  void carry() {
    for (auto* words : {&columns, &rows, &total, &also}) {
      for (size_t i = 0; i < words->size(); i += ExactSum::kWords) exact_carry(words->data() + i);
    }
  }
  bool operator==(const Sums&) const = default;
};

Sums by_core(const std::vector<float>& x) {
  Sums s;
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) {
      const float term = x[static_cast<size_t>(r * kCols + c)];
      exact_add(term, s.columns.data() + c * ExactSum::kWords);
      exact_add(term, s.rows.data() + r * ExactSum::kWords);
      exact_add(term, s.total.data());
      exact_add(term, s.also.data());
    }
  }
  s.carry();
  return s;
}

Sums by_lanes(const std::vector<float>& x) {
  Sums s;
  emulator::machine.launch(1, cuda::kLanes, [&] {
    const int lane = static_cast<int>(threadIdx.x);
    int64_t* columns = s.columns.data() + lane * kEach * ExactSum::kWords;
    cuda::LaneSums<true> of_columns;
    cuda::LaneSums<false> total;
    for (int r = 0; r < kRows; ++r) {
      float terms[kEach];
      for (int e = 0; e < kEach; ++e)
        terms[e] = x[static_cast<size_t>(r * kCols + lane * kEach + e)];
      of_columns.add(terms, columns);
      total.add(terms, s.total.data());
      cuda::add_row(terms, s.rows.data() + r * ExactSum::kWords, s.also.data(), lane);
    }
    of_columns.flush(columns);
    total.flush(s.total.data());
  });
  s.carry();
  return s;
}

void test_sums() {
  Numbers numbers;
  const auto same = [&](const std::string& what, auto term) {
    std::vector<float> x;
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kCols; ++c) x.push_back(term(r, c));
    }
    check(by_lanes(x) == by_core(x), what);
  };
  for (const auto [low, high] : {std::pair{0u, 1u},
                                 {0u, 3u},
                                 {126u, 127u},
                                 {100u, 140u},
                                 {60u, 180u},
                                 {0u, 255u},
                                 {250u, 255u},
                                 {254u, 255u}}) {
    same("exponents from " + std::to_string(low) + " to " + std::to_string(high),
         [&, low = low, high = high](int, int) { return numbers.between(low, high); });
  }
  same("zeros", [](int, int) { return 0.0f; });
  same("zeros but for a few",
       [&](int r, int c) { return (r * kCols + c) % 37 == 5 ? numbers.between(80, 130) : 0.0f; });
  same("growing rows", [&](int r, int) {
    const auto at = static_cast<uint32_t>(8 * r);
    return numbers.between(at, at + 6);
  });
  same("shrinking rows", [&](int r, int) {
    const auto at = static_cast<uint32_t>(8 * (kRows - 1 - r));
    return numbers.between(at, at + 6);
  });
  same("lanes of other sizes", [&](int, int c) {
    const auto at = static_cast<uint32_t>(c % 250);
    return numbers.between(at, at + 5);
  });
  same("all the largest number", [](int, int) { return bits_float(0x7f7fffffu); });
  same("the largest and the smallest",
       [](int r, int c) { return (r + c) % 2 ? bits_float(0x7f7fffffu) : bits_float(1u); });
  same("not finite", [&](int r, int c) {
    if ((r * kCols + c) % 501 == 7) return INFINITY;
    if ((r * kCols + c) % 701 == 3) return std::nanf("");
    return numbers.between(100, 140);
  });
}

}  // namespace
}  // namespace lowbit

int main() {
  lowbit::test_sums();
  return finish();
}
