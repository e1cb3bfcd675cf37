#include "io/text.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>

namespace lowbit::ckpt {
namespace {

/// The code point at the start of `s` and its length in bytes; length 0 where it is not UTF-8.
struct Point {
  uint32_t value;
  size_t length;
};

Point decode(std::string_view s) {
  const auto at = [s](size_t i) { return static_cast<uint8_t>(s[i]); };
  const uint8_t lead = at(0);
  if (lead < 0x80) return {lead, 1};
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || s.size() < length) return {0, 0};
  uint32_t value = lead & (0x7fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((at(i) & 0xc0) != 0x80) return {0, 0};
    value = value << 6 | (at(i) & 0x3f);
  }
  const uint32_t minimum = length == 4 ? 0x10000 : length == 3 ? 0x800 : 0x80;
  return value < minimum || value > 0x10ffff ? Point{0, 0} : Point{value, length};
}

/// Whether a character of ASCII is shown as it is: those of nearly all names.
bool is_plain(char c) { return c >= 0x20 && c < 0x7f && c != '\\'; }

bool is_surrogate(uint32_t c) { return c >= 0xd800 && c <= 0xdfff; }

bool is_harmless(uint32_t c) {
  if (c < 0x20 || (c >= 0x7f && c < 0xa0) || c == '\\') return false;
  const bool direction = c == 0x61c || (c >= 0x200b && c <= 0x200f) ||
                         (c >= 0x2028 && c <= 0x202e) || (c >= 0x2060 && c <= 0x206f);
  return !direction && !is_surrogate(c) && c != 0xfeff && (c < 0xfff0 || c > 0xffff) && c < 0xe0000;
}

}  // namespace

bool is_utf8(std::string_view text, bool surrogates) {
  while (!text.empty()) {
    const Point point = decode(text);
    if (point.length == 0 || (!surrogates && is_surrogate(point.value))) return false;
    text.remove_prefix(point.length);
  }
  return true;
}

std::string printable(std::string_view name) {
  constexpr size_t kLongest = 400;
  if (name.size() > kLongest) {
    return printable(name.substr(0, kLongest / 2)) + "..." +
           printable(name.substr(name.size() - kLongest / 2));
  }
  if (std::ranges::all_of(name, is_plain)) return std::string(name);
  std::string out;
  while (!name.empty()) {
    const Point point = decode(name);
    const size_t length = point.length == 0 ? 1 : point.length;
    if (point.length != 0 && is_harmless(point.value)) {
      out += name.substr(0, length);
    } else if (name[0] == '\\') {
      out += "\\\\";
    } else {
      for (const char c : name.substr(0, length)) {
        char escaped[8];
        std::snprintf(escaped, sizeof escaped, "\\x%02x",
                      static_cast<unsigned>(static_cast<uint8_t>(c)));
        out += escaped;
      }
    }
    name.remove_prefix(length);
  }
  return out;
}

std::string some_of(const std::vector<std::string>& names, size_t shown) {
  std::string out;
  for (size_t i = 0; i < std::min(names.size(), shown); ++i)
    out += (i > 0 ? ", " : "") + printable(names[i]);
  if (names.size() > shown) out += " and " + std::to_string(names.size() - shown) + " more";
  return out;
}

}  // namespace lowbit::ckpt
