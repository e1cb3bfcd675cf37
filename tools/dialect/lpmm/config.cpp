#include "dialect/lpmm/config.h"

#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// A node of yacs' configuration trees, of which lpmm's qconfig is one.
Value node() { return {.kind = Value::Kind::kDict, .text = Value::kConfiguration}; }

Value only(const char* name) {
  Value v = node();
  v.set("DEFAULT", Value::words(name));
  v.set("DEFAULT_ONLY", Value::boolean(true));
  return v;
}

Value quantizer(bool enable, int64_t bits, const char* scale, const char* type, const char* round,
                int64_t group, bool is_signed) {
  Value v = node();
  v.set("ENABLE", Value::boolean(enable));
  v.set("THRESHOLD", Value::number(4096));
  v.set("EXCLUDE_SUFFIX", Value::list({Value::words("")}));
  v.set("EXCLUDE_REGEX", Value::list({Value::words("")}));
  v.set("BITS", Value::number(bits));
  v.set("SCALE_TYPE", only(scale));
  v.set("QUANT_TYPE", only(type));
  v.set("ROUND_TYPE", Value::words(round));
  v.set("GROUP_SIZE", Value::number(group));
  v.set("SIGNED", Value::boolean(is_signed));
  return v;
}

}  // namespace

Result<LpmmConfig> LpmmConfig::of(const Wanted& wanted) {
  if (wanted.block != 0 && wanted.block != 128)
    return usage("lpmm's groups are written with 128 values, not " + std::to_string(wanted.block));
  const std::string& f = wanted.state_format;
  if (f.empty() || f == "4bit") return LpmmConfig{};
  if (f == "4bit-rank1") return LpmmConfig{true, true};
  if (f == "float32") return LpmmConfig{false, false};
  return usage("lpmm's states are not written as " + printable(f) +
               "; take 4bit (groups of 128, its default), 4bit-rank1 or float32");
}

Value LpmmConfig::value() const {
  Value quant = node();
  quant.set("INIT_STATES", Value::list({Value::words("param")}));
  quant.set("P", quantizer(false, 8, "group", "linear", "sr", 64, true));
  Value gradients = node();
  gradients.set("ENABLE", Value::boolean(false));
  gradients.set("THRESHOLD", Value::number(4096));
  quant.set("G", std::move(gradients));
  quant.set("M", quantizer(quantized, kBits, "group", "nonlinear", "real-nearest", 128, true));
  quant.set("SQM", quantizer(quantized, kBits, rank1 ? "rank1" : "group", "power-1", "real-nearest",
                             128, false));
  Value debug = node();
  for (const char* name :
       {"TRUNCATED_RATE_STAT_ITER", "ROW_ABSMAX_STAT_ITER", "ROW_ABSMAX_STAT_EPOCH"})
    debug.set(name, Value::boolean(false));
  quant.set("DEBUG", std::move(debug));
  Value root = node();
  root.set("BASE", Value::list({Value::words("")}));
  root.set("QUANT", std::move(quant));
  root.set("TRAIN", node());
  root.set("OUTPUT", Value::words("."));
  root.set("TAG", Value::words(""));
  root.set("LOCAL_RANK", Value::number(0));
  return root;
}

}  // namespace lowbit::ckpt
