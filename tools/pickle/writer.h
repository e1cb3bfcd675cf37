// Writes the pickle opcodes that torch's own files use. Globals and texts are memoized as in
// Python's pickler, so that a repeated one takes two bytes.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace lowbit::ckpt {

/// The low `width` bytes of n, little-endian.
inline std::string little(uint64_t n, int width) {
  std::string s;
  for (int i = 0; i < width; ++i) s += static_cast<char>(n >> (8 * i) & 0xff);
  return s;
}

class PickleWriter {
 public:
  explicit PickleWriter(int protocol) {
    raw("\x80").raw(little(static_cast<uint64_t>(protocol), 1));
  }
  PickleWriter& none() { return raw("N"); }
  PickleWriter& boolean(bool b) { return raw(b ? "\x88" : "\x89"); }
  PickleWriter& integer(int64_t n) {
    if (n >= 0 && n < 256) return raw("K").raw(little(static_cast<uint64_t>(n), 1));
    if (n >= 0 && n < 65536) return raw("M").raw(little(static_cast<uint64_t>(n), 2));
    if (n >= INT32_MIN && n <= INT32_MAX) return raw("J").raw(little(static_cast<uint32_t>(n), 4));
    int width = 5;  // the fewest bytes that keep the sign
    while (width < 8 && n >> (8 * width - 1) != 0 && n >> (8 * width - 1) != -1) ++width;
    return raw("\x8a")
        .raw(little(static_cast<uint64_t>(width), 1))
        .raw(little(static_cast<uint64_t>(n), width));
  }
  PickleWriter& floating(double x) {
    const uint64_t bits = std::bit_cast<uint64_t>(x);
    std::string big;
    for (int i = 7; i >= 0; --i) big += static_cast<char>(bits >> (8 * i) & 0xff);
    return raw("G").raw(big);
  }
  /// Bytes as protocol 2 writes them: _codecs.encode(text, "latin1").
  PickleWriter& bytes(std::string_view s) {
    global("_codecs", "encode");
    return text(latin1(s)).text("latin1").tuple(2).call();
  }
  /// A bytearray as protocol 2 writes it: bytearray(text, "latin-1").
  PickleWriter& bytearray(std::string_view s) {
    global("__builtin__", "bytearray");
    if (s.empty()) return tuple(0).call().put();
    return text(latin1(s)).text("latin-1").tuple(2).put().call().put();
  }
  /// An integer of 9 to 255 bytes, little-endian.
  PickleWriter& long_integer(std::string_view s) {
    return raw("\x8a").raw(little(s.size(), 1)).raw(s);
  }
  PickleWriter& text(std::string_view s) {
    return once('t' + std::string(s), "X" + little(s.size(), 4) + std::string(s));
  }
  /// Text that is a Python object of its own: equal text elsewhere does not share its memo entry.
  PickleWriter& own_text(std::string_view s) {
    return once('k' + std::string(s), "X" + little(s.size(), 4) + std::string(s));
  }
  PickleWriter& global(std::string_view module, std::string_view name) {
    const std::string both = std::string(module) + "\n" + std::string(name) + "\n";
    return once('g' + both, "c" + both);
  }
  PickleWriter& mark() { return raw("("); }
  /// A tuple of the last n values. If n > 3, mark() must come before them.
  PickleWriter& tuple(size_t n) {
    return raw(n == 0 ? ")" : n == 1 ? "\x85" : n == 2 ? "\x86" : n == 3 ? "\x87" : "t");
  }
  PickleWriter& integers(const std::vector<int64_t>& values) {
    if (values.size() > 3) mark();
    for (const int64_t v : values) integer(v);
    return tuple(values.size());
  }
  PickleWriter& empty_dict() { return raw("}"); }
  PickleWriter& empty_list() { return raw("]"); }
  PickleWriter& set_items() { return raw("u"); }   // after mark(), key, value, ...
  PickleWriter& set_item() { return raw("s"); }    // after key, value
  PickleWriter& appends() { return raw("e"); }     // after mark(), value, ...
  PickleWriter& append() { return raw("a"); }      // after value
  PickleWriter& call() { return raw("R"); }        // after callable, arguments
  PickleWriter& object() { return raw(")\x81"); }  // after class
  PickleWriter& build() { return raw("b"); }       // after object, state
  PickleWriter& persistent() { return raw("Q"); }
  /// Memoizes the last value, as Python's pickler does for tuples and objects.
  PickleWriter& put() {
    const uint64_t index = memo_size_++;
    return index < 256 ? raw("q").raw(little(index, 1)) : raw("r").raw(little(index, 4));
  }
  /// The memo index that the next `put` uses.
  uint64_t next() const { return memo_size_; }
  PickleWriter& get(uint64_t index) {
    return index < 256 ? raw("h").raw(little(index, 1)) : raw("j").raw(little(index, 4));
  }
  std::string finish() { return std::move(raw(".").out_); }

 private:
  /// The text whose characters are these bytes, in UTF-8.
  static std::string latin1(std::string_view s) {
    std::string utf8;
    for (const char c : s) {
      const auto b = static_cast<unsigned char>(c);
      if (b < 0x80) {
        utf8 += c;
      } else {
        utf8 += static_cast<char>(0xc0 | b >> 6);
        utf8 += static_cast<char>(0x80 | (b & 0x3f));
      }
    }
    return utf8;
  }
  PickleWriter& raw(std::string_view s) {
    out_ += s;
    return *this;
  }
  PickleWriter& once(std::string key, const std::string& bytes) {
    const auto [known, is_new] = memo_.try_emplace(std::move(key), memo_size_);
    if (is_new) return raw(bytes).put();
    return get(known->second);
  }
  std::string out_;
  std::unordered_map<std::string, uint64_t> memo_;
  uint64_t memo_size_ = 0;
};

}  // namespace lowbit::ckpt
