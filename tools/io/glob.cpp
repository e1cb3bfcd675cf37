#include "io/glob.h"

#include <string>
#include <utility>

namespace lowbit::ckpt {
namespace {

/// The characters of UTF-8 text. Bytes that are not UTF-8 are characters of their own.
std::u32string characters(std::string_view text) {
  std::u32string out;
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t k) { return static_cast<unsigned char>(text[k]); };
    const unsigned char first = byte(i);
    const size_t more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : first >= 0xc0 ? 1 : 0;
    char32_t c = first & (0xff >> (more == 0 ? 0 : more + 2));
    size_t k = 1;
    for (; k <= more && i + k < text.size() && (byte(i + k) & 0xc0) == 0x80; ++k)
      c = (c << 6) | (byte(i + k) & 0x3f);
    if (k <= more) c = 0x110000 + first, k = 1;
    out.push_back(c);
    i += k;
  }
  return out;
}

/// Length of the element of `p` that stands for one character, and whether `c` fits it.
std::pair<size_t, bool> one(std::u32string_view p, char32_t c) {
  if (p[0] != U'[') return {1, p[0] == U'?' || p[0] == c};
  const bool inverted = p.size() > 1 && p[1] == U'!';
  const size_t start = inverted ? 2 : 1;
  const size_t end = p.find(U']', start + 1);  // a ']' that comes first is one of the set
  if (end == std::u32string_view::npos) return {1, c == U'['};
  bool inside = false;
  for (size_t i = start; i < end; ++i) {
    if (i + 2 < end && p[i + 1] == U'-') {
      inside = inside || (p[i] <= c && c <= p[i + 2]);
      i += 2;
    } else {
      inside = inside || p[i] == c;
    }
  }
  return {end + 1, inside != inverted};
}

}  // namespace

bool glob_matches(std::string_view pattern_text, std::string_view name_text) {
  const std::u32string pattern = characters(pattern_text), name = characters(name_text);
  size_t p = 0, n = 0, star = std::u32string::npos, from = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == U'*') {
      star = p++;
      from = n;
      continue;
    }
    if (p < pattern.size()) {
      const auto [length, fits] = one(std::u32string_view(pattern).substr(p), name[n]);
      if (fits) {
        p += length;
        ++n;
        continue;
      }
    }
    if (star == std::u32string::npos) return false;
    // The last star takes one character more; stars before it need not be tried again.
    p = star + 1;
    n = ++from;
  }
  while (p < pattern.size() && pattern[p] == U'*') ++p;
  return p == pattern.size();
}

}  // namespace lowbit::ckpt
