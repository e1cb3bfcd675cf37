#include "pipeline/role.h"

#include <regex>

namespace lowbit::ckpt {
namespace {

/// The part of a flat name behind its last '.', with it; empty where that is no key but too long
/// for one: std::regex recurses.
std::string last_key(const std::string& name) {
  const size_t dot = name.rfind('.');
  const std::string leaf = dot == std::string::npos ? "." + name : name.substr(dot);
  return leaf.size() > 100 ? "" : leaf;
}

/// Whether the name lies in an optimizer's state: state.., optim.state.., and so on. Short keys such
/// as "scale" and "step" are a state's only there; elsewhere they are a module's parameters.
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

}  // namespace

std::string kind_of(const std::string& name) {
  static const std::regex coded(
      "_((?:dynamic|linear|power1_|power2_)[2-8](?:_unsigned)?|float8_e[45]m[23](?:_unsigned)?|"
      "log8(?:_fixed|_signed)?|log16|companded8(?:_unsigned)?)"
      "(_scale(?:_row|_column|_tensor|_rank1_[0-9])?)?$");
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
  if (std::regex_search(leaf, match, coded))
    return (match[2].matched ? "scales, " : "codes, ") + match[1].str();
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
      "^\\.(?:exp_avg_sq|max_exp_avg_sq|max_exp_avg_sqs|square_avg|second_momentum_buffer)"
      "(?:_bfloat16|_row|_col)?$");
  static const std::regex positive_in_state(
      "(?:_scale(?:_row|_column|_tensor|_rank1_[0-9])?|^\\.(?:absmax[12]?|scale|step|state2)|"
      "^\\.(?:sum|variance|row_var|col_var)(?:_bfloat16|_row|_col)?)$");
  static const std::regex state(
      "^\\.(?:exp_avg|exp_avg_slow|momentum_buffer|grad_avg|update_norm|m1_m2|"
      "exp_avg_res_(?:row|col)|param_[a-z0-9_]+)(?:_bfloat16)?$");
  const std::string leaf = last_key(name);
  if (std::regex_search(leaf, logarithmic)) return Role::kState;
  if (std::regex_search(leaf, positive)) return Role::kPositiveState;
  if (std::regex_search(leaf, state)) return Role::kState;
  if (kind_of(name).starts_with("scales, ")) return Role::kPositiveState;
  if (!in_state(name)) return Role::kWeight;
  if (std::regex_search(leaf, positive_in_state)) return Role::kPositiveState;
  return leaf == ".state1" ? Role::kState : Role::kWeight;
}

}  // namespace lowbit::ckpt
