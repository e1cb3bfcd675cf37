// Everything that reads bytes which anybody may have written, one function each: what libFuzzer
// drives, and what the tests replay.
#pragma once

#include <span>
#include <string_view>

#include "fuzz/mutate.h"

namespace lowbit::ckpt {

struct FuzzTarget {
  const char* name;        // of the target and of its corpus, tests/ckpt/corpus/NAME
  const char* dictionary;  // NAME.dict beside this file
  /// Whether the input was accepted. It may be anything; nothing may crash, leak, or take more than
  /// its limits, and what is accepted and written again must be read as the same.
  bool (*read)(std::string_view input);
  Mutator mutate;
};

std::span<const FuzzTarget> fuzz_targets();
/// Null where there is none of that name.
const FuzzTarget* find_fuzz_target(std::string_view name);

}  // namespace lowbit::ckpt
