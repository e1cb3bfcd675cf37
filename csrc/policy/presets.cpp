#include "policy/presets.h"

#include <algorithm>

#include "catalog/catalog.h"

namespace lowbit {
namespace {

constexpr Preset kPresets[] = {
    {"8bit", {"dynamic8"}, {"dynamic8_unsigned"}},
    // Below 8 bits the second moment's map has no zero: a step divides by its root.
    {"7bit", {"dynamic7"}, {"power1_7_unsigned"}},
    {"6bit", {"dynamic6"}, {"power1_6_unsigned"}},
    {"5bit", {"dynamic5"}, {"power1_5_unsigned"}},
    {"4bit", {"dynamic4"}, {"power1_4_unsigned"}},
    {"3bit", {"dynamic3"}, {"power1_3_unsigned"}},
    {"2bit", {"dynamic2"}, {"power1_2_unsigned"}},
    {"fp8", {"float8_e4m3"}, {"float8_e4m3_unsigned"}},
    {"fp8_e5m2", {"float8_e5m2"}, {"float8_e5m2_unsigned"}},
    {"log8", {"log8_signed"}, {"log8"}},
    {"linear8", {"linear8"}, {"linear8_unsigned"}},
    // Its map has a zero, and a sign that a second moment does not need.
    {"uniform8", {"uniform8"}, {"linear8_unsigned"}},
    {"companded8", {"companded8"}, {"companded8_unsigned"}},
    // Even steps, a zero, and short blocks: what Newton-Schulz forgives most of 4 bits
    // (docs/loss/muon-formats.md).
    {"muon4", {"linear4", "block", 32}, {"power1_4_unsigned"}},
    {"lpmm4", {"dynamic4", "block", 128}, {"power1_4_unsigned", "rank1"}},
    {"factored8", {"dynamic8"}, {kFactored}},
    {"factored4", {"dynamic4"}, {kFactored}},
    {"bfloat16", {"bfloat16"}, {"bfloat16"}},
    {"bfloat16_stochastic",
     {"bfloat16", nullptr, 0, "stochastic"},
     {"bfloat16", nullptr, 0, "stochastic"}},
    {"float32", {"float32"}, {"float32"}},
};

}  // namespace

std::span<const Preset> presets() { return kPresets; }

std::optional<StateSpec> state_spec(const std::string& state_format, bool is_signed) {
  PresetState said{state_format.c_str()};
  for (const Preset& preset : kPresets) {
    if (state_format == preset.name) said = is_signed ? preset.with_sign : preset.without_sign;
  }
  StateSpec spec{said.format};
  if (spec.factored()) return spec;
  const int format = find_state(spec.format);
  if (format < 0) return std::nullopt;
  if (said.rounding != nullptr) spec.rounding = said.rounding;
  const StateInfo info = state_info(format);
  if (!info.scaled) return spec;
  spec.scale = said.scale == nullptr ? "block" : said.scale;
  if (spec.scale == "block") spec.block = said.block == 0 ? info.block : said.block;
  return spec;
}

StateSpec slow_mean_spec(const StateSpec& said, bool full_precision) {
  if (said.format == "float32" || (full_precision && (said.coded() || said.factored())))
    return StateSpec{"float32"};
  return *state_spec(kSlowMean, true);
}

}  // namespace lowbit
