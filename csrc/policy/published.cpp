#include "policy/published.h"

#include "core/layout.h"
#include "core/mean_bins.h"
#include "policy/lowrank_plan.h"
#include "policy/names.h"
#include "policy/plan.h"
#include "policy/presets.h"
#include "policy/thresholds.h"
#include "policy/workspace.h"

namespace lowbit {
namespace {

std::string state_json(const PresetState& state) {
  json::Fields fields{{"format", json::text(state.format)}};
  if (state.scale != nullptr) fields.emplace_back("scale", json::text(state.scale));
  if (state.block != 0) fields.emplace_back("block", std::to_string(state.block));
  if (state.rounding != nullptr) fields.emplace_back("rounding", json::text(state.rounding));
  return json::object(fields);
}

}  // namespace

json::Fields policy_fields() {
  std::vector<std::string> all, prefixes, blocks, lowrank;
  for (const Preset& preset : presets()) {
    all.push_back(json::object({{"name", json::text(preset.name)},
                                {"signed", state_json(preset.with_sign)},
                                {"unsigned", state_json(preset.without_sign)}}));
  }
  for (const std::string_view prefix : wrapper_prefixes()) prefixes.push_back(json::text(prefix));
  for (const char* column : LowRankPlan::kNames) lowrank.push_back(json::text(column));
  for (int block = kMinBlock; block <= kMaxBlock; block *= 2)
    blocks.push_back(std::to_string(block));
  return {{"presets", json::array(all)},
          {"thresholds", json::object({{"min_dims", std::to_string(kMinDims)},
                                       {"min_numel", std::to_string(kMinNumel)},
                                       {"min_cols", std::to_string(kMinCols)}})},
          {"slow_mean", json::text(kSlowMean)},
          {"blocks", json::array(blocks)},
          {"wrapper_prefixes", json::array(prefixes)},
          {"mean_addends", std::to_string(MeanBins::kMaxTerms)},
          {"plan", plan_json()},
          {"lowrank_plan", json::array(lowrank)},
          {"workspace", workspace_json()}};
}

}  // namespace lowbit
