// What `--state-format` may say: lowbit's presets and formats (lowbit/presets.py has the same table).
#pragma once

#include <string>
#include <vector>

#include "container/manifest.h"
#include "io/status.h"

namespace lowbit::ckpt {

/// How one state is kept.
struct Spec {
  std::string format;          // of the catalog, or "factored"
  std::string scale = "none";  // "block", "rank1", "none"
  int64_t block = 0;
  std::string rounding = "nearest";
  bool coded() const { return scale != "none"; }
  bool factored() const { return format == "factored"; }
  bool operator==(const Spec&) const = default;
  /// As lowbit.scaled(...) has it.
  Value value() const;
};

/// What a preset or format means for a state with (`is_signed`) or without negative values. `block`
/// 0: the format's own. Errors are of usage (exit code 2).
Result<Spec> spec_of(const std::string& state_format, bool is_signed, int64_t block);
std::vector<std::string> preset_names();

}  // namespace lowbit::ckpt
