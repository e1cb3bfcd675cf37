#include "dialect/presets.h"

#include "dialect/coding.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

struct Preset {
  const char *name, *with_sign, *without;
};

constexpr Preset kPresets[] = {
    {"8bit", "dynamic8", "dynamic8_unsigned"},
    // Below 8 bits the second moment's map has no zero: a step divides by its root.
    {"7bit", "dynamic7", "power1_7_unsigned"},
    {"6bit", "dynamic6", "power1_6_unsigned"},
    {"5bit", "dynamic5", "power1_5_unsigned"},
    {"4bit", "dynamic4", "power1_4_unsigned"},
    {"3bit", "dynamic3", "power1_3_unsigned"},
    {"2bit", "dynamic2", "power1_2_unsigned"},
    {"fp8", "float8_e4m3", "float8_e4m3_unsigned"},
    {"fp8_e5m2", "float8_e5m2", "float8_e5m2_unsigned"},
    {"log8", "log8_signed", "log8"},
    {"linear8", "linear8", "linear8_unsigned"},
    {"companded8", "companded8", "companded8_unsigned"},
    {"lpmm4", "dynamic4", "power1_4_unsigned"},
    {"factored8", "dynamic8", "factored"},
    {"factored4", "dynamic4", "factored"},
    {"bfloat16", "bfloat16", "bfloat16"},
    {"bfloat16_stochastic", "bfloat16", "bfloat16"},
    {"float32", "float32", "float32"},
};

Error usage(std::string text) { return {Exit::kUsage, std::move(text)}; }

}  // namespace

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& p : kPresets) names.emplace_back(p.name);
  return names;
}

Value Spec::value() const {
  Value v{.kind = Value::Kind::kDict};
  v.set("format", Value::words(format));
  if (factored()) return v;
  v.set("scale", Value::words(scale));
  v.set("block", Value::number(block));
  v.set("rounding", Value::words(rounding));
  return v;
}

Result<Spec> spec_of(const std::string& state_format, bool is_signed, int64_t block) {
  Spec out;
  out.format = state_format;
  for (const Preset& p : kPresets) {
    if (state_format == p.name) out.format = is_signed ? p.with_sign : p.without;
  }
  if (out.factored()) {
    if (is_signed) return usage("a state with negative values cannot be stored factored");
    return out;
  }
  if (state_format == "bfloat16_stochastic") out.rounding = "stochastic";
  const FormatInfo* info = find_format(out.format);
  if (info == nullptr) {
    std::string all;
    for (const std::string& name : preset_names()) all += (all.empty() ? "" : ", ") + name;
    return usage("no preset and no state format is named " + printable(state_format) +
                 "; presets are " + all);
  }
  if (is_signed && !info->is_signed)
    return usage("a state has negative values, which the unsigned format " + out.format +
                 " cannot hold");
  if (!info->scaled) {
    if (block != 0) return usage(out.format + " has no scales; leave --block out");
    return out;
  }
  if (state_format == "lpmm4" && !is_signed) {
    out.scale = "rank1";
    return out;
  }
  out.scale = "block";
  out.block = block == 0 ? info->block : block;
  if (out.block < 32 || out.block > 2048 || (out.block & (out.block - 1)) != 0)
    return usage("--block must be a power of two from 32 to 2048, not " + std::to_string(block));
  return out;
}

}  // namespace lowbit::ckpt
