// Pickles as lists of opcodes, each with its argument.
#include <algorithm>
#include <array>
#include <optional>

#include "fuzz/mutate.h"

namespace lowbit::ckpt {
namespace {

/// An opcode and its argument. `size`: bytes of the length before a text; `fixed`: bytes of a
/// number.
struct Op {
  std::string bytes;
  size_t size = 0, fixed = 0;
  bool lines = false;  // two lines of text
};

constexpr char kFrame = '\x95';

std::optional<size_t> length_at(std::string_view text, size_t width) {
  if (text.size() < width) return std::nullopt;
  uint64_t n = 0;
  for (size_t i = 0; i < width; ++i) n |= uint64_t{static_cast<uint8_t>(text[i])} << (8 * i);
  return n <= text.size() - width ? std::optional<size_t>(n) : std::nullopt;
}

/// The opcode at the start of a text; none where there is no whole one.
std::optional<Op> op_of(std::string_view text) {
  Op op;
  switch (text[0]) {
    case 'X':
    case 'B':
    case 'T':
    case '\x8b':
      op.size = 4;
      break;
    case 'U':
    case 'C':
    case '\x8c':
    case '\x8a':
      op.size = 1;
      break;
    case '\x8d':
    case '\x8e':
    case '\x96':
      op.size = 8;
      break;
    case 'K':
    case 'q':
    case 'h':
    case '\x80':
      op.fixed = 1;
      break;
    case 'M':
      op.fixed = 2;
      break;
    case 'J':
    case 'r':
    case 'j':
      op.fixed = 4;
      break;
    case 'G':
    case kFrame:
      op.fixed = 8;
      break;
    case 'c':
      op.lines = true;
      break;
    default:
      if (std::string_view("().]}NRtaesubQ012\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94")
              .find(text[0]) == std::string_view::npos)
        return std::nullopt;
  }
  size_t end = 1 + op.fixed;
  if (op.size > 0) {
    const auto length = length_at(text.substr(1), op.size);
    if (!length) return std::nullopt;
    end += op.size + *length;
  } else if (op.lines) {
    const size_t first = text.find('\n');
    const size_t second = first == text.npos ? first : text.find('\n', first + 1);
    if (second == text.npos) return std::nullopt;
    end = second + 1;
  }
  if (end > text.size()) return std::nullopt;
  op.bytes = text.substr(0, end);
  return op;
}

/// The same opcode with another text.
void set_text(Op& op, std::string text) {
  if (op.size == 1) text.resize(std::min<size_t>(text.size(), 255));
  std::string length;
  for (size_t i = 0; i < op.size; ++i)
    length += static_cast<char>(i < 4 ? text.size() >> (8 * i) & 0xff : 0);
  op.bytes = op.bytes[0] + length + text;
}

std::string text_of(const Op& op) { return op.bytes.substr(1 + op.size); }

/// Opcodes without an argument, and some with, to be put anywhere.
const std::array<std::string_view, 20>& words() {
  static constexpr std::array<std::string_view, 20> kWords = {"(",
                                                              ")",
                                                              "]",
                                                              "}",
                                                              "N",
                                                              "\x88",
                                                              "\x89",
                                                              "t",
                                                              "\x85",
                                                              "\x86",
                                                              "\x87",
                                                              "a",
                                                              "s",
                                                              "u",
                                                              "R",
                                                              "b",
                                                              "Q",
                                                              "\x81",
                                                              "J\xff\xff\xff\x7f",
                                                              "\x8a\x01\xff"};
  return kWords;
}

void change_argument(Op& op, std::vector<Op>& all, Dice& dice) {
  if (op.fixed > 0) {
    uint64_t real = 0;
    for (size_t i = 0; i < op.fixed; ++i)
      real |= uint64_t{static_cast<uint8_t>(op.bytes[1 + i])} << (8 * i);
    const uint64_t other = dice.number(real);
    for (size_t i = 0; i < op.fixed; ++i) op.bytes[1 + i] = static_cast<char>(other >> (8 * i));
  } else if (op.size > 0) {
    std::vector<const Op*> alike;
    for (const Op& other : all) {
      if (other.size == op.size) alike.push_back(&other);
    }
    std::string text = text_of(op);
    if (dice.one_in(2)) {
      text = text_of(*dice.any(alike));
    } else {
      dice.bytes(text, text.size() + 8);
    }
    set_text(op, std::move(text));
  } else if (op.lines) {
    std::vector<std::string> globals;
    for (const Op& other : all) {
      if (other.lines) globals.push_back(other.bytes);
    }
    op.bytes = dice.any(globals);
  } else {
    op.bytes = words()[dice.below(18)];
  }
}

}  // namespace

void mutate_pickle(std::string& input, size_t most, Dice& dice) {
  std::vector<Op> ops;
  size_t at = 0;
  while (at < input.size()) {
    auto op = op_of(std::string_view(input).substr(at));
    if (!op) break;
    at += op->bytes.size();
    if (op->bytes[0] != kFrame) ops.push_back(std::move(*op));
  }
  if (ops.size() < 3 || dice.one_in(50)) return mutate_bytes(input, most, dice);
  std::string rest = input.substr(at);
  const auto place = [&](size_t i) { return ops.begin() + static_cast<std::ptrdiff_t>(i); };
  for (size_t edits = 1 + dice.below(3); edits > 0 && !ops.empty(); --edits) {
    const size_t i = dice.below(ops.size());
    const size_t run = 1 + dice.below(std::min<size_t>(ops.size() - i, 12));
    switch (dice.below(8)) {
      case 0:
        ops.erase(place(i), place(i + (dice.one_in(2) ? 1 : run)));
        break;
      case 1: {
        const std::vector<Op> some(place(i), place(i + run));
        ops.insert(place(dice.below(ops.size() + 1)), some.begin(), some.end());
        break;
      }
      case 2:
        std::swap(ops[i], dice.any(ops));
        break;
      case 3:
        ops.insert(place(i), Op{std::string(words()[dice.below(words().size())])});
        break;
      case 4:
        if (!rest.empty()) dice.bytes(rest, rest.size() + 8);
        break;
      default:
        change_argument(ops[i], ops, dice);
    }
  }
  std::string made;
  for (const Op& op : ops) made += op.bytes;
  made += rest;
  if (made.size() <= most) input = std::move(made);
}

}  // namespace lowbit::ckpt
