// libFuzzer's entry for every target: LOWBIT_FUZZ_TARGET=zip fuzz_ckpt CORPUS -max_total_time=60.
// Without that variable it prints "NAME DICTIONARY" for each.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "fuzz/targets.h"

namespace {
const lowbit::ckpt::FuzzTarget* chosen = nullptr;
}

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char* name = std::getenv("LOWBIT_FUZZ_TARGET");
  chosen = name == nullptr ? nullptr : lowbit::ckpt::find_fuzz_target(name);
  if (chosen != nullptr) return 0;
  for (const auto& target : lowbit::ckpt::fuzz_targets())
    std::printf("%s %s\n", target.name, target.dictionary);
  std::exit(name == nullptr ? 0 : 2);
}

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);

/// Two mutants of three know the format.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  using lowbit::ckpt::Dice;
  Dice dice{std::mt19937(seed), [](std::string& bytes, size_t limit) {
              const size_t room = std::max<size_t>(limit, 1), had = std::min(bytes.size(), room);
              bytes.resize(room);
              bytes.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(bytes.data()), had, room));
            }};
  if (dice.one_in(3)) return LLVMFuzzerMutate(data, size, most);
  std::string input(reinterpret_cast<const char*>(data), size);
  chosen->mutate(input, most, dice);
  std::memcpy(data, input.data(), std::min(input.size(), most));
  return std::min(input.size(), most);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  chosen->read({reinterpret_cast<const char*>(data), size});
  return 0;
}
