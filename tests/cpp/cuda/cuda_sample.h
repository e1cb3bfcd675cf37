// Which cases of a list run: all of them in the emulator. A simulator is slow, so there a sample,
// of which each list is reported as soon as it was compared:
//
//   SIM_SAMPLE=4     the first case of each list and at most 4 others; 0: all
//   SIM_PIECE=2/5    of the lists every fifth, from the second on
//   SIM_STEPS=2      at most two steps of each case
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace lowbit {
namespace {

struct Sample {
  size_t largest = SIZE_MAX, run = 0, of = 0, lists = 0;
  size_t piece = 0, pieces = 1;
  int most_steps = INT_MAX;
  bool reports = false;

  Sample() {
    const char *number = std::getenv("SIM_SAMPLE"), *part = std::getenv("SIM_PIECE"),
               *count = std::getenv("SIM_STEPS");
    reports = number != nullptr;
    if (reports && std::atoi(number) > 0) largest = static_cast<size_t>(std::atoi(number));
    if (count != nullptr) most_steps = std::atoi(count);
    if (part == nullptr) return;
    if (std::sscanf(part, "%zu/%zu", &piece, &pieces) != 2 || piece < 1 || piece > pieces) {
      std::fprintf(stderr, "SIM_PIECE is %s, and not like 2/5\n", part);
      std::exit(2);
    }
    --piece;
  }
  ~Sample() {
    if (!whole()) std::printf("%zu of %zu cases\n", run, of);
  }
  bool whole() const { return largest == SIZE_MAX && pieces == 1; }
  int steps(int wanted) const { return std::min(wanted, most_steps); }

  /// Says what was compared of the list that runs, so that an interrupted run shows how far it
  /// came.
  void report(size_t cases, int differ, const std::string& first) const {
    if (!reports) return;
    std::printf("list %zu: %zu cases, %d differ; first %s\n", lists, cases, differ, first.c_str());
    std::fflush(stdout);
  }

  /// Whether case i of `count` runs: the first, and at most `largest` others, evenly spaced. Each
  /// list begins somewhere else, so that lists of like cases do not run the same ones. None of a
  /// list of another piece.
  bool operator()(size_t i, size_t count) {
    if (i == 0) ++lists;
    const size_t every = count > largest ? (count + largest - 1) / largest : 1;
    ++of;
    if ((lists - 1) % pieces != piece) return false;
    if (i != 0 && i % every != lists % every) return false;
    ++run;
    return true;
  }
  template <class T>
  std::vector<T> of_list(const std::vector<T>& all) {
    std::vector<T> chosen;
    for (size_t i = 0; i < all.size(); ++i) {
      if ((*this)(i, all.size())) chosen.push_back(all[i]);
    }
    return chosen;
  }
};
inline Sample sample;

}  // namespace
}  // namespace lowbit
