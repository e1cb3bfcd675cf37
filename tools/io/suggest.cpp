#include "io/suggest.h"

#include <algorithm>

namespace lowbit::ckpt {
namespace {

/// How many letters must be added, left out, changed or swapped with their neighbour.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min(
          {d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

}  // namespace

std::string nearest_word(const std::string& word, const std::vector<std::string>& known) {
  constexpr size_t kLongest = 40;
  if (word.size() > kLongest) return "";
  std::string best;
  size_t least = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string& candidate : known) {
    // "--world" is the beginning of "--world-size".
    const bool begins = word.size() > 3 && candidate.starts_with(word);
    const size_t d = begins ? 1 : distance(word, candidate);
    if (d < least) least = d, best = candidate;
  }
  return best;
}

std::string did_you_mean(const std::string& word, const std::vector<std::string>& known) {
  const std::string meant = nearest_word(word, known);
  return meant.empty() ? "" : "; did you mean " + meant + "?";
}

}  // namespace lowbit::ckpt
