// What the catalog says of this room, for Python.
#pragma once

#include "catalog/json.h"

namespace lowbit {

/// "presets": [{"name", "signed", "unsigned"}, ...], "thresholds": {...}, "slow_mean": "...",
/// "blocks": [...], "wrapper_prefixes": [...], "mean_addends": the most addends of an exact mean,
/// "plan": {...}, "lowrank_plan": [names of columns], "workspace": {...}. What a preset leaves to
/// the format is left out.
json::Fields policy_fields();

}  // namespace lowbit
