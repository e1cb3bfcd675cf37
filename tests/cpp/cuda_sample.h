// Which cases of a list run: all of them in the emulator. A simulator is slow, so there a sample.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace lowbit {
namespace {

struct Sample {
  size_t largest = SIZE_MAX, run = 0, of = 0, lists = 0;

  Sample() {
    const char* number = std::getenv("SIM_SAMPLE");  // 0: all
    if (number != nullptr && std::atoi(number) > 0)
      largest = static_cast<size_t>(std::atoi(number));
  }
  ~Sample() {
    if (!whole()) std::printf("%zu of %zu cases\n", run, of);
  }
  bool whole() const { return largest == SIZE_MAX; }

  /// Whether case i of `count` runs: the first, and at most `largest` others, evenly spaced. Each
  /// list begins somewhere else, so that lists of like cases do not run the same ones.
  bool operator()(size_t i, size_t count) {
    if (i == 0) ++lists;
    const size_t every = count > largest ? (count + largest - 1) / largest : 1;
    ++of;
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
