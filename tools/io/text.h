// Text from files: whether it is UTF-8, and how to print it safely on a terminal.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace lowbit::ckpt {

/// Whether `text` is UTF-8. `surrogates` allows lone surrogates, which Python's pickles may contain
/// ("surrogatepass").
bool is_utf8(std::string_view text, bool surrogates);

/// Whether a word is one of these.
inline bool is_one_of(std::string_view word, std::initializer_list<std::string_view> words) {
  return std::ranges::find(words, word) != words.end();
}

/// A name from a file on one line, safe to print. Control characters, characters without width or
/// that change the direction of text, backslashes and invalid UTF-8 are escaped. A long name is
/// shortened in the middle.
std::string printable(std::string_view name);

/// The first names, printable, and how many more there are: "a, b, c and 2 more".
std::string some_of(const std::vector<std::string>& names, size_t shown = 3);

}  // namespace lowbit::ckpt
