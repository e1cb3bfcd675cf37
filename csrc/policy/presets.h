// What `state_format` may name: presets, and what each means for a state of an update rule.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace lowbit {

/// The format of a second moment that is stored as row and column means.
inline constexpr const char* kFactored = "factored";

/// How a preset stores a state. Only the format is always given.
struct PresetState {
  const char* format;              // of the catalog, or kFactored
  const char* scale = nullptr;     // null: of blocks, where the format has scales
  int block = 0;                   // 0: the format's own
  const char* rounding = nullptr;  // null: to the nearest
};

struct Preset {
  const char* name;
  PresetState with_sign, without_sign;  // of a state with negative values, and of one without
};

std::span<const Preset> presets();

/// The preset of a mean over thousands of steps (`Slot::is_slow`), whatever preset the other states
/// have: the smallest format that keeps it.
inline constexpr const char* kSlowMean = "bfloat16_stochastic";

/// How one state of a parameter is stored, in full.
struct StateSpec {
  std::string format;                // of the catalog, or kFactored
  std::string scale = "none";        // "none", "block", "rank1"
  int64_t block = 0;                 // elements of a block, 0 where the scale is of none
  std::string rounding = "nearest";  // or "stochastic"

  bool coded() const { return scale != "none"; }
  bool factored() const { return format == kFactored; }
  bool operator==(const StateSpec&) const = default;
};

/// What a preset, or a format of the catalog by its own name, means for a state with (`is_signed`)
/// or without negative values. Nothing where the catalog has no such format.
std::optional<StateSpec> state_spec(const std::string& state_format, bool is_signed);

/// What `said`, a preset's or a format's meaning, becomes for a mean over thousands of steps:
/// kSlowMean, but float32 where it was said, or where a parameter in full precision would not have
/// codes.
StateSpec slow_mean_spec(const StateSpec& said, bool full_precision);

}  // namespace lowbit
