// Writes the few pickle opcodes that torch's own files use, without memo.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lowbit::ckpt::emit {

inline std::string little(uint64_t n, int width) {
  std::string s;
  for (int i = 0; i < width; ++i) s += static_cast<char>(n >> (8 * i) & 0xff);
  return s;
}
inline std::string none() { return "N"; }
inline std::string boolean(bool b) { return b ? "\x88" : "\x89"; }
inline std::string integer(int64_t n) {
  if (n >= 0 && n < 256) return "K" + little(static_cast<uint64_t>(n), 1);
  if (n >= 0 && n < 65536) return "M" + little(static_cast<uint64_t>(n), 2);
  if (n >= INT32_MIN && n <= INT32_MAX) return "J" + little(static_cast<uint32_t>(n), 4);
  return std::string("\x8a\x08", 2) + little(static_cast<uint64_t>(n), 8);
}
inline std::string text(std::string_view s) { return "X" + little(s.size(), 4) + std::string(s); }
inline std::string global(std::string_view module, std::string_view name) {
  return "c" + std::string(module) + "\n" + std::string(name) + "\n";
}
/// A tuple of pickled items.
inline std::string tuple(const std::vector<std::string>& items) {
  if (items.empty()) return ")";
  std::string s = items.size() > 3 ? "(" : "";
  for (const std::string& item : items) s += item;
  return s + (items.size() == 1   ? "\x85"
              : items.size() == 2 ? "\x86"
              : items.size() == 3 ? "\x87"
                                  : "t");
}
inline std::string integers(const std::vector<int64_t>& values) {
  std::vector<std::string> items;
  for (const int64_t v : values) items.push_back(integer(v));
  return tuple(items);
}
/// A dict of pickled keys and values, alternating.
inline std::string dict(const std::string& items) {
  return items.empty() ? "}" : "}(" + items + "u";
}
inline std::string list(const std::string& items) {
  return items.empty() ? "]" : "](" + items + "e";
}
inline std::string call(const std::string& callable, const std::string& arguments) {
  return callable + arguments + "R";
}
/// cls.__new__(cls) with a state.
inline std::string object(const std::string& cls, const std::string& state) {
  return cls + ")\x81" + state + "b";
}

}  // namespace lowbit::ckpt::emit
