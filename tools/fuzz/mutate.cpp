#include "fuzz/mutate.h"

#include <algorithm>

#include "fuzz/entries.h"

namespace lowbit::ckpt {

uint64_t Dice::number(uint64_t real) {
  switch (below(5)) {
    case 0:
      return below(5);
    case 1:
      return (uint64_t{1} << below(64)) - 1 + below(3);
    case 2:
      return ~uint64_t{0} - below(3);
    case 3:
      return real * below(4);
    default:
      return real - 2 + below(5);
  }
}

void mutate_bytes(std::string& input, size_t most, Dice& dice) {
  dice.bytes(input, most);
  if (input.size() > most) input.resize(most);
}

void mutate_two_pickles(std::string& input, size_t most, Dice& dice) {
  constexpr size_t kLength = 2;
  const auto byte = [&](size_t i) { return static_cast<size_t>(static_cast<uint8_t>(input[i])); };
  const size_t cut = input.size() < kLength ? 0 : byte(0) | byte(1) << 8;
  if (input.size() < kLength || cut > input.size() - kLength || dice.one_in(50))
    return mutate_bytes(input, most, dice);
  std::string halves[] = {input.substr(kLength, cut), input.substr(kLength + cut)};
  const size_t which = dice.below(2);
  mutate_pickle(halves[which], most / 2, dice);
  if (halves[0].size() > 0xffff) return;
  input = {static_cast<char>(halves[0].size() & 0xff), static_cast<char>(halves[0].size() >> 8)};
  input += halves[0] + halves[1];
}

void mutate_safetensors(std::string& input, size_t most, Dice& dice) {
  constexpr size_t kLength = 8;
  uint64_t length = 0;
  for (size_t i = 0; i < kLength && input.size() >= kLength; ++i)
    length |= uint64_t{static_cast<uint8_t>(input[i])} << (8 * i);
  if (input.size() < kLength || length > input.size() - kLength || dice.one_in(50))
    return mutate_bytes(input, most, dice);
  std::string header = input.substr(kLength, length), data = input.substr(kLength + length);
  if (dice.one_in(8)) {
    mutate_bytes(data, most - std::min(most, header.size() + kLength), dice);
  } else {
    mutate_json(header, most / 2, dice);
  }
  std::string out;
  for (size_t i = 0; i < kLength; ++i) out += static_cast<char>(header.size() >> (8 * i) & 0xff);
  input = out + header + data;
}

void mutate_file(std::string& input, size_t most, Dice& dice) {
  if (input.starts_with("PK")) return mutate_zip(input, most, dice);
  if (input.starts_with("\x80")) return mutate_pickle(input, most, dice);
  if (input.starts_with("{")) return mutate_json(input, most, dice);
  if (input.size() > 8 && (input[8] == '{' || input[8] == ' '))
    return mutate_safetensors(input, most, dice);
  mutate_bytes(input, most, dice);
}

void mutate_folder(std::string& input, size_t most, Dice& dice) {
  std::vector<FolderEntry> entries = entries_of(input);
  if (entries.empty() || dice.one_in(50)) return mutate_bytes(input, most, dice);
  const size_t at = dice.below(entries.size());
  FolderEntry& entry = entries[at];
  const FolderEntry other = dice.any(entries);
  switch (dice.below(24)) {
    case 0:
      entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    case 1:
      entry.name = other.name;
      break;
    case 2:
      entry.data = other.data;
      break;
    case 3:
      mutate_bytes(entry.name, 64, dice);
      break;
    case 4:
      entry.name = "sub/" + entry.name;
      break;
    case 5:
      entry.name += " -> " + other.name;
      break;
    case 6:
      entries.push_back({entry.name + "2", entry.data});
      break;
    default: {
      const size_t rest = input.size() - std::min(input.size(), entry.data.size());
      mutate_file(entry.data, most - std::min(most, rest), dice);
    }
  }
  std::string made = text_of(entries);
  if (made.size() <= most) input = std::move(made);
}

}  // namespace lowbit::ckpt
