// libFuzzer's entry for every target: LOWBIT_FUZZ_TARGET=zip fuzz_ckpt CORPUS -max_total_time=60.
// Without that variable it prints "NAME DICTIONARY" for each.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

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

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  chosen->read({reinterpret_cast<const char*>(data), size});
  return 0;
}
