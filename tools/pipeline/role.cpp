#include "pipeline/role.h"

#include <regex>

#include "dialect/model/formats.h"

namespace lowbit::ckpt {
namespace {

/// The part of a flat name behind its last '.', with it; empty where that is not a key but too long
/// for one: std::regex recurses.
std::string last_key(const std::string& name) {
  const size_t dot = name.rfind('.');
  const std::string leaf = dot == std::string::npos ? "." + name : name.substr(dot);
  return leaf.size() > 100 ? "" : leaf;
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
bool has_key(const std::string& name, const std::string& key) {
  return name.starts_with(key + ".") || name.find("." + key + ".") != std::string::npos;
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

/// The format of codes that a key ends with: "float8_e4m3" of ".exp_avg_float8_e4m3"; "" if the
/// catalog has none.
std::string code_format(const std::string& key) {
  for (size_t at = key.find('_'); at != std::string::npos; at = key.find('_', at + 1)) {
    const FormatInfo* format = find_format(key.substr(at + 1));
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
  static const std::regex beside("\\.param_[a-z0-9_]+$");
  static const std::regex factored("\\.(?:exp_avg_sq|exp_avg_res|variance)_(?:row|col)$");
  static const std::regex wide(
      "\\.(?:exp_avg|exp_avg_sq|max_exp_avg_sq|exp_avg_slow|momentum_buffer|square_avg|grad_avg|"
      "sum|variance|update_norm|projection|second_momentum_buffer)(_bfloat16)?$");
  static const std::regex short_key("\\.(?:sum|variance|projection)$");
  const std::string leaf = last_key(name);
  for (const char* format : {"bfloat16", "float32"})  // of lowbit.EMA: parameters' names follow
    if (has_key(name, std::string("average_") + format))
      return std::string("averages of weights, ") + format;
  std::smatch match;
  static const std::regex scale("_scale(?:_row|_column|_tensor|_rank1_[0-9])?$");
  const bool scales = std::regex_search(leaf, match, scale);
  if (const std::string format = code_format(scales ? match.prefix().str() : leaf); !format.empty())
    return (scales ? "scales, " : "codes, ") + format;
  if (std::regex_search(leaf, beside)) return "kept beside weights";
  if (std::regex_search(leaf, factored)) return "factored moments, float32";
  if (std::regex_search(leaf, match, wide) &&
      (!std::regex_search(leaf, short_key) || in_state(name)))
    return match[1].matched ? "full-precision state, bfloat16" : "full-precision state, float32";
  if (leaf == ".step" && in_state(name)) return "step counters";
  if (leaf == ".n_averaged") return "step counters";
  if (leaf == ".stream" && in_state(name)) return "random streams";
  if (leaf == ".shape" && in_state(name)) return "shapes of parameters";
  return "weights and other tensors";
}

Role role_of(const std::string& name) {
  static const std::regex logarithmic("_log[0-9_a-z]*_scale$");
  static const std::regex positive(
      "^\\.(?:exp_avg_sq|max_exp_avg_sq|max_exp_avg_sqs|exp_avg_res|square_avg|"
      "second_momentum_buffer)"
      "(?:_bfloat16|_row|_col)?$");
  static const std::regex positive_in_state(
      "(?:_scale(?:_row|_column|_tensor|_rank1_[0-9])?|^\\.(?:absmax[12]?|scale|step|state2)|"
      "^\\.(?:sum|variance|row_var|col_var)(?:_bfloat16|_row|_col)?)$");
  static const std::regex state(
      "^\\.(?:exp_avg|exp_avg_slow|momentum_buffer|grad_avg|update_norm|m1_m2|"
      "param_[a-z0-9_]+)(?:_bfloat16)?$");
  if (is_megatron_bucket(name)) return Role::kWeight;
  if (const std::string state = megatron_state(name); !state.empty())
    return state == "exp_avg_sq"      ? Role::kPositiveState
           : state.ends_with("param") ? Role::kWeight
                                      : Role::kState;
  const std::string leaf = last_key(name);
  if (leaf == ".error_bits") return Role::kBits;  // FlashOptim's, 16 of them as a bfloat16
  if (std::regex_search(leaf, logarithmic)) return Role::kState;
  if (std::regex_search(leaf, positive)) return Role::kPositiveState;
  if (std::regex_search(leaf, state)) return Role::kState;
  if (kind_of(name).starts_with("scales, ")) return Role::kPositiveState;
  if (!in_state(name)) return Role::kWeight;
  if (std::regex_search(leaf, positive_in_state)) return Role::kPositiveState;
  return Role::kState;
}

}  // namespace lowbit::ckpt
