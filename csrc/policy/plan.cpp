#include "policy/plan.h"

#include <array>
#include <string>
#include <vector>

#include "catalog/json.h"

namespace lowbit {
namespace {

/// The names of the columns, each at its offset in PlanRow.
std::array<std::string, kPlanColumns> column_names() {
  std::array<std::string, kPlanColumns> names;
  const auto name = [&](size_t offset, std::string given) {
    names[offset / sizeof(int64_t)] = std::move(given);
  };
#define LB_COLUMN(field) name(offsetof(PlanRow, field), #field)
  LB_COLUMN(rows), LB_COLUMN(cols), LB_COLUMN(global_cols), LB_COLUMN(first), LB_COLUMN(stream);
  LB_COLUMN(param_format), LB_COLUMN(numel), LB_COLUMN(batches), LB_COLUMN(inner_rows);
  LB_COLUMN(inner_cols), LB_COLUMN(global_inner_rows), LB_COLUMN(global_inner_cols);
  LB_COLUMN(dims), LB_COLUMN(front), LB_COLUMN(back), LB_COLUMN(cut);
#undef LB_COLUMN
  for (size_t k = 0; k < kMaxSlots; ++k) {
    const size_t at = offsetof(PlanRow, slot) + k * sizeof(PlanSlot);
    const std::string slot = "slot_" + std::to_string(k) + '_';
    name(at + offsetof(PlanSlot, format), slot + "format");
    name(at + offsetof(PlanSlot, block), slot + "block");
    name(at + offsetof(PlanSlot, scale), slot + "scale");
    name(at + offsetof(PlanSlot, stochastic), slot + "stochastic");
  }
  for (size_t d = 0; d < PlanRow::kMaxDims; ++d)
    name(offsetof(PlanRow, dim) + d * sizeof(int64_t), "dim_" + std::to_string(d));
  return names;
}

template <class Names>
std::string texts(const Names& names) {
  std::vector<std::string> all;
  for (const auto& name : names) all.push_back(json::text(name));
  return json::array(all);
}

}  // namespace

std::string plan_json() {
  return json::object({{"columns", texts(column_names())},
                       {"slots", std::to_string(kMaxSlots)},
                       {"dims", std::to_string(PlanRow::kMaxDims)},
                       {"scales", texts(kScaleNames)},
                       {"cuts", texts(kCutNames)}});
}

}  // namespace lowbit
