// Mutations that know a format: they change what a pickle, a zip or a header says, and keep true
// what a reader would refuse at once, such as lengths and checksums. libFuzzer calls them
// (main.cpp), and so do the tests, which replay mutants without it.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace lowbit::ckpt {

/// Where a mutation's choices come from.
struct Dice {
  std::mt19937 rng;
  /// Mutates plain bytes, to at most so many.
  std::function<void(std::string&, size_t)> bytes;

  size_t below(size_t n) { return n == 0 ? 0 : rng() % n; }
  bool one_in(size_t n) { return below(n) == 0; }
  /// A number at which readers err: near 0, near a power of two, or near `real`.
  uint64_t number(uint64_t real);
  template <class T>
  T& any(std::vector<T>& of) {
    return of[below(of.size())];
  }
};

/// Changes an input, to at most `most` bytes. What is not of the format is mutated as plain bytes.
using Mutator = void (*)(std::string& input, size_t most, Dice& dice);

void mutate_bytes(std::string& input, size_t most, Dice& dice);
/// Pickles, one behind the other, and bytes behind them: opcodes and their arguments.
void mutate_pickle(std::string& input, size_t most, Dice& dice);
/// Two pickles behind the length of the first, two bytes of it.
void mutate_two_pickles(std::string& input, size_t most, Dice& dice);
/// JSON: its tokens.
void mutate_json(std::string& input, size_t most, Dice& dice);
/// A safetensors file: its header, whose length stays true, or the bytes behind it.
void mutate_safetensors(std::string& input, size_t most, Dice& dice);
/// Zips, one behind the other: a field of a directory, or what a record holds, with its checksum. A
/// record of a single zip may change its length, or be gone or there twice.
void mutate_zip(std::string& input, size_t most, Dice& dice);
/// A folder's entries (entries.h): their names, or what one of them holds.
void mutate_folder(std::string& input, size_t most, Dice& dice);
/// Whichever of these an input looks like.
void mutate_file(std::string& input, size_t most, Dice& dice);

}  // namespace lowbit::ckpt
