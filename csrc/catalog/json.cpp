#include "catalog/json.h"

#include "catalog/catalog.h"
#include "core/registry.h"

namespace lowbit {

namespace json {

std::string text(std::string_view s) { return '"' + std::string(s) + '"'; }
std::string flag(bool b) { return b ? "true" : "false"; }

std::string array(const std::vector<std::string>& items) {
  std::string all;
  for (const std::string& item : items) all += (all.empty() ? "" : ", ") + item;
  return '[' + all + ']';
}

std::string object(const Fields& fields) {
  std::string all;
  for (const auto& [name, value] : fields)
    all += (all.empty() ? "" : ", ") + text(name) + ": " + value;
  return '{' + all + '}';
}

}  // namespace json

namespace {

using json::flag;
using json::text;

template <class U>
std::string rule_json(int index) {
  std::vector<std::string> slots, hypers, factors, grids;
  std::string number;
  if constexpr (factors_of<U>() > 0) {
    for (int i = 0; i < U::kFactors; ++i) factors.push_back(text(U::kFactor[i]));
  }
  if constexpr (numbers_of<U>() > 0) number = U::kNumber;
  if constexpr (rounds_of<U>() > 0) {
    for (int i = 0; i < U::kRounds; ++i) grids.push_back(std::to_string(U::grid_factor(i)));
  }
  for (int i = 0; i < U::kSlots; ++i) {
    slots.push_back(json::object({{"name", text(U::kSlot[i].name)},
                                  {"signed", flag(U::kSlot[i].is_signed)},
                                  {"weight", flag(U::kSlot[i].is_weight)},
                                  {"slow", flag(U::kSlot[i].is_slow)}}));
  }
  for (int i = 0; i < U::kHypers; ++i) hypers.push_back(text(U::kHyper[i]));
  return json::object({{"name", text(U::kName)},
                       {"index", std::to_string(index)},
                       {"slots", json::array(slots)},
                       {"hyper", json::array(hypers)},
                       {"factors", json::array(factors)},
                       {"rounds", std::to_string(rounds_of<U>())},
                       {"grids", json::array(grids)},
                       {"numbers", std::to_string(numbers_of<U>())},
                       {"number", text(number)}});
}

template <class... U>
std::vector<std::string> rules_json(Types<U...>) {
  int index = 0;
  return {rule_json<U>(index++)...};
}

std::string state_json(int index) {
  const StateInfo s = state_info(index);
  return json::object({{"name", text(s.name)},
                       {"index", std::to_string(index)},
                       {"bits", std::to_string(s.bits)},
                       {"scaled", flag(s.scaled)},
                       {"block", std::to_string(s.block)},
                       {"signed", flag(s.is_signed)},
                       {"dtype", text(s.dtype)},
                       {"domain", text(s.domain)},
                       {"scale_dtype", text(s.scale_dtype)},
                       {"scale_numbers", std::to_string(s.scale_numbers)},
                       {"cross_tile", flag(s.cross_tile)}});
}

std::string param_json(int index) {
  const ParamInfo p = param_info(index);
  return json::object({{"name", text(p.name)},
                       {"index", std::to_string(index)},
                       {"dtype", text(p.dtype)},
                       {"compensation", text(p.compensation_dtype)},
                       {"compensation_bytes", std::to_string(p.compensation_bytes)},
                       {"random", flag(p.random)}});
}

}  // namespace

json::Fields catalog_fields() {
  std::vector<std::string> state, param;
  for (int i = 0; i < state_count(); ++i) state.push_back(state_json(i));
  for (int i = 0; i < param_count(); ++i) param.push_back(param_json(i));
  return {{"state", json::array(state)},
          {"rules", json::array(rules_json(UpdateRules{}))},
          {"param", json::array(param)}};
}

}  // namespace lowbit
