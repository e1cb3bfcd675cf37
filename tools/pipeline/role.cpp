#include "pipeline/role.h"

#include <initializer_list>
#include <optional>
#include <string_view>

#include "dialect/model/formats.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// The text without the first of these ends that it has.
std::string_view without_end(std::string_view text, std::initializer_list<std::string_view> ends) {
  for (const std::string_view end : ends) {
    if (text.ends_with(end)) return text.substr(0, text.size() - end.size());
  }
  return text;
}

/// Whether a text has small letters, digits and '_' alone.
bool is_word(std::string_view text) {
  return text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == text.npos;
}

/// The part of a flat name behind its last '.'; empty where that is too long for a key.
std::string_view last_key(std::string_view name) {
  const std::string_view key = name.substr(name.rfind('.') + 1);
  return key.size() < 100 ? key : std::string_view();
}

/// What stands before the end of a key of scales, such as "_scale" or "_scale_row"; nullopt where
/// the key is none.
std::optional<std::string_view> before_scale(std::string_view key) {
  constexpr std::string_view kScale = "_scale", kRank = "_rank1_";
  const size_t at = key.rfind(kScale);
  if (at == key.npos) return std::nullopt;
  const std::string_view end = key.substr(at + kScale.size());
  const bool rank = end.starts_with(kRank) && end.size() == kRank.size() + 1 && end.back() >= '0' &&
                    end.back() <= '9';
  if (!rank && !is_one_of(end, {"", "_row", "_column", "_tensor"})) return std::nullopt;
  return key.substr(0, at);
}

/// Whether a key is that of the scales of logarithmic codes, which may be negative.
bool has_logarithmic_scale(std::string_view key) {
  const std::string_view stem = without_end(key, {"_scale"});
  const size_t at = stem.rfind("_log");
  return stem.size() < key.size() && at != stem.npos && is_word(stem.substr(at));
}

/// Whether a key is "param_" with a word behind it: what is kept beside a weight.
bool is_beside_weight(std::string_view key) {
  constexpr std::string_view kParam = "param_";
  return key.starts_with(kParam) && key.size() > kParam.size() && is_word(key);
}

/// Whether the name lies in an optimizer's state: state.., optim.state.., and so on. Short keys
/// such as "scale" and "step" are a state's only there; elsewhere they are a module's parameters.
bool in_state(const std::string& name) {
  for (size_t at = 0, end; (end = name.find('.', at)) != std::string::npos; at = end + 1) {
    const std::string_view key(name.data() + at, end - at);
    if (key == "state") return true;
    if (key == "model") return false;
  }
  return false;
}

/// Whether one of the keys before the last is this one.
bool has_key(std::string_view name, std::string_view key) {
  for (size_t at = name.find(key); at != name.npos; at = name.find(key, at + 1)) {
    const size_t end = at + key.size();
    if ((at == 0 || name[at - 1] == '.') && end < name.size() && name[end] == '.') return true;
  }
  return false;
}

/// The state that a tensor of Megatron-Core's optimizer has, as its name ends elsewhere: "exp_avg"
/// of "optimizer.state.exp_avg.fc1.weight"; empty for other tensors.
std::string megatron_state(const std::string& name) {
  static constexpr std::string_view kState = "optimizer.state.";
  const size_t at = name.starts_with("chained_") ? name.find('.') + 1 : 0;
  if (at == std::string::npos || name.compare(at, kState.size(), kState) != 0) return "";
  const size_t begin = at + kState.size(), dot = name.find('.', begin);
  const std::string state = dot == std::string::npos ? "" : name.substr(begin, dot - begin);
  for (const char* known : {"exp_avg", "exp_avg_sq", "momentum_buffer", "fp32_param", "param"}) {
    if (state == known) return state;
  }
  return "";
}

/// The format of codes that a key ends with: "float8_e4m3" of "exp_avg_float8_e4m3"; "" if the
/// catalog has none.
std::string code_format(std::string_view key) {
  for (size_t at = key.find('_'); at != key.npos; at = key.find('_', at + 1)) {
    const FormatInfo* format = find_format(std::string(key.substr(at + 1)));
    if (format != nullptr && (format->bits < 16 || format->scaled)) return format->name;
  }
  return "";
}

/// Whether a tensor is a flat bucket of Megatron-Core's, with padding that nobody initialized.
bool is_megatron_bucket(const std::string& name) {
  return name.find("optimizer.distributed.") != std::string::npos &&
         name.find(".bucket_idx_") != std::string::npos;
}

}  // namespace

std::string kind_of(const std::string& name) {
  if (const std::string state = megatron_state(name); !state.empty())
    return state.ends_with("param") ? "master weights" : "full-precision state, float32";
  for (const char* format : {"bfloat16", "float32"})  // of lowbit.EMA: parameters' names follow
    if (has_key(name, std::string("average_") + format))
      return std::string("averages of weights, ") + format;
  const std::string_view key = last_key(name);
  const auto scaled = before_scale(key);
  if (const std::string format = code_format(scaled.value_or(key)); !format.empty())
    return (scaled ? "scales, " : "codes, ") + format;
  if (is_beside_weight(key)) return "kept beside weights";
  const std::string_view factored = without_end(key, {"_row", "_col"});
  if (factored != key && is_one_of(factored, {"exp_avg_sq", "exp_avg_res", "variance"}))
    return "factored moments, float32";
  const std::string_view wide = without_end(key, {"_bfloat16"});
  if (is_one_of(wide, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_avg_slow", "momentum_buffer",
                       "square_avg", "grad_avg", "sum", "variance", "update_norm", "projection",
                       "second_momentum_buffer"}) &&
      (!is_one_of(key, {"sum", "variance", "projection"}) || in_state(name)))
    return wide == key ? "full-precision state, float32" : "full-precision state, bfloat16";
  if (key == "step" && in_state(name)) return "step counters";
  if (key == "n_averaged") return "step counters";
  if (key == "stream" && in_state(name)) return "random streams";
  if (key == "shape" && in_state(name)) return "shapes of parameters";
  return "weights and other tensors";
}

Role role_of(const std::string& name) {
  if (is_megatron_bucket(name)) return Role::kWeight;
  if (const std::string state = megatron_state(name); !state.empty())
    return state == "exp_avg_sq"      ? Role::kPositiveState
           : state.ends_with("param") ? Role::kWeight
                                      : Role::kState;
  const std::string_view key = last_key(name);
  if (key == "error_bits") return Role::kBits;  // FlashOptim's, 16 of them as a bfloat16
  if (has_logarithmic_scale(key)) return Role::kState;
  const std::string_view stem = without_end(key, {"_bfloat16", "_row", "_col"});
  if (is_one_of(stem, {"exp_avg_sq", "max_exp_avg_sq", "max_exp_avg_sqs", "exp_avg_res",
                       "square_avg", "second_momentum_buffer"}))
    return Role::kPositiveState;
  if (is_beside_weight(key) ||
      is_one_of(without_end(key, {"_bfloat16"}),
                {"exp_avg", "exp_avg_slow", "momentum_buffer", "grad_avg", "update_norm", "m1_m2"}))
    return Role::kState;
  if (kind_of(name).starts_with("scales, ")) return Role::kPositiveState;
  if (!in_state(name)) return Role::kWeight;
  const bool positive =
      before_scale(key) ||
      is_one_of(key, {"absmax", "absmax1", "absmax2", "scale", "step", "state2"}) ||
      is_one_of(stem, {"sum", "variance", "row_var", "col_var"});
  return positive ? Role::kPositiveState : Role::kState;
}

}  // namespace lowbit::ckpt
