#include "dialect/model/presets.h"

#include <fmt/format.h>

#include "core/layout.h"
#include "dialect/model/formats.h"
#include "io/suggest.h"
#include "io/text.h"
#include "policy/presets.h"

namespace lowbit::ckpt {

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) names.emplace_back(preset.name);
  return names;
}

Value value_of(const StateSpec& spec) {
  Value v{.kind = Value::Kind::kDict};
  v.set("format", Value::words(spec.format));
  if (spec.factored()) return v;
  v.set("scale", Value::words(spec.scale));
  v.set("block", Value::number(spec.block));
  v.set("rounding", Value::words(spec.rounding));
  return v;
}

Result<StateSpec> spec_of(const std::string& state_format, bool is_signed, int64_t block) {
  const auto said = state_spec(state_format, is_signed);
  if (!said)
    return usage(fmt::format("no preset and no state format is named {}; presets are {}{}",
                             printable(state_format), fmt::join(preset_names(), ", "),
                             did_you_mean(state_format, preset_names())));
  StateSpec spec = *said;
  if (spec.factored()) {
    if (is_signed) return usage("a state with negative values cannot be stored factored");
    return spec;
  }
  if (is_signed && !find_format(spec.format)->is_signed)
    return usage("a state has negative values, which the unsigned format " + spec.format +
                 " cannot hold");
  if (!spec.coded()) {
    if (block != 0) return usage(spec.format + " has no scales; leave --block out");
    return spec;
  }
  if (spec.scale != "block") return spec;
  if (block != 0) spec.block = block;
  if (spec.block < kMinBlock || spec.block > kMaxBlock || (spec.block & (spec.block - 1)) != 0)
    return usage("--block must be a power of two from " + std::to_string(kMinBlock) + " to " +
                 std::to_string(kMaxBlock) + ", not " + std::to_string(block));
  return spec;
}

}  // namespace lowbit::ckpt
