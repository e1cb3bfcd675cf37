// What `--state-format` and `--block` ask for: presets and formats of policy/presets.h.
#pragma once

#include <string>
#include <vector>

#include "container/manifest/manifest.h"
#include "io/status.h"

namespace lowbit {
struct StateSpec;  // policy/presets.h, which those who ask for one include
}
namespace lowbit::ckpt {

/// How a state is kept, as lowbit.scaled(...) has it.
Value value_of(const StateSpec& spec);

/// What a preset or format means for a state with (`is_signed`) or without negative values. `block`
/// 0: what the preset says. Errors are of usage (exit code 2).
Result<StateSpec> spec_of(const std::string& state_format, bool is_signed, int64_t block);
std::vector<std::string> preset_names();

}  // namespace lowbit::ckpt
