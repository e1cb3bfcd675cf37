// JSON as a list of tokens.
#include <algorithm>

#include "fuzz/mutate.h"

namespace lowbit::ckpt {
namespace {

bool is_number(const std::string& token) {
  return token[0] == '-' || (token[0] >= '0' && token[0] <= '9');
}

/// Texts with their quotes, numbers and words, and any other byte by itself.
std::vector<std::string> tokens_of(std::string_view text) {
  std::vector<std::string> out;
  const auto in_word = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' ||
           c == '+' || c == '.';
  };
  for (size_t at = 0; at < text.size();) {
    size_t end = at + 1;
    if (text[at] == '"') {
      while (end < text.size() && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
      end = std::min(end + 1, text.size());
    } else if (in_word(text[at])) {
      while (end < text.size() && in_word(text[end])) ++end;
    }
    out.emplace_back(text.substr(at, end - at));
    at = end;
  }
  return out;
}

/// Where the value ends that begins at a token: behind the bracket that closes it.
size_t value_end(const std::vector<std::string>& tokens, size_t at) {
  size_t depth = 0;
  for (size_t i = at; i < tokens.size(); ++i) {
    const char c = tokens[i][0];
    if (c == '{' || c == '[') ++depth;
    if ((c == '}' || c == ']') && depth > 0) --depth;
    if (depth == 0) return i + 1;
  }
  return tokens.size();
}

}  // namespace

void mutate_json(std::string& input, size_t most, Dice& dice) {
  std::vector<std::string> tokens = tokens_of(input);
  if (tokens.size() < 3 || dice.one_in(50)) return mutate_bytes(input, most, dice);
  const auto place = [&](size_t i) { return tokens.begin() + static_cast<std::ptrdiff_t>(i); };
  for (size_t edits = 1 + dice.below(3); edits > 0 && !tokens.empty(); --edits) {
    const size_t i = dice.below(tokens.size());
    std::string& token = tokens[i];
    const size_t end = value_end(tokens, i);
    switch (dice.below(6)) {
      case 0:
        tokens.erase(place(i), place(end));
        break;
      case 1: {
        std::vector<std::string> value(place(i), place(end));
        if (dice.one_in(2)) value.insert(value.begin(), ",");
        tokens.insert(place(dice.below(tokens.size() + 1)), value.begin(), value.end());
        break;
      }
      case 2:
        std::swap(token, dice.any(tokens));
        break;
      default:
        if (is_number(token)) {
          token = std::to_string(dice.number(std::strtoull(token.c_str(), nullptr, 10)));
          if (dice.one_in(8)) token = "-" + token;
        } else if (token[0] == '"' && token.size() > 1 && dice.one_in(2)) {
          std::string inner = token.substr(1, token.size() - 2);
          dice.bytes(inner, inner.size() + 8);
          token = '"' + inner + '"';
        } else {
          token = dice.any(tokens);
        }
    }
    std::erase(tokens, std::string());
  }
  std::string made;
  for (const std::string& token : tokens) made += token;
  if (made.size() <= most) input = std::move(made);
}

}  // namespace lowbit::ckpt
