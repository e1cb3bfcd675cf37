#include "catalog/json.h"

#include "catalog/catalog.h"

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

std::string rule_json(int index) {
  const RuleInfo r = rule_info(index);
  std::vector<std::string> slots, hypers, factors, grids;
  for (int i = 0; i < r.slots; ++i) {
    slots.push_back(json::object({{"name", text(r.slot[i].name)},
                                  {"signed", flag(r.slot[i].is_signed)},
                                  {"weight", flag(r.slot[i].is_weight)},
                                  {"slow", flag(r.slot[i].is_slow)}}));
  }
  for (int i = 0; i < r.hypers; ++i) hypers.push_back(text(r.hyper[i]));
  for (int i = 0; i < r.factors; ++i) factors.push_back(text(r.factor[i]));
  for (int i = 0; i < r.rounds; ++i) grids.push_back(std::to_string(r.grid_factor[i]));
  return json::object({{"name", text(r.name)},
                       {"index", std::to_string(index)},
                       {"slots", json::array(slots)},
                       {"hyper", json::array(hypers)},
                       {"factors", json::array(factors)},
                       {"rounds", std::to_string(r.rounds)},
                       {"grids", json::array(grids)},
                       {"numbers", std::to_string(r.numbers)},
                       {"number", text(r.number)}});
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
  std::vector<std::string> state, rules, param;
  for (int i = 0; i < state_count(); ++i) state.push_back(state_json(i));
  for (int i = 0; i < rule_count(); ++i) rules.push_back(rule_json(i));
  for (int i = 0; i < param_count(); ++i) param.push_back(param_json(i));
  return {
      {"state", json::array(state)}, {"rules", json::array(rules)}, {"param", json::array(param)}};
}

}  // namespace lowbit
