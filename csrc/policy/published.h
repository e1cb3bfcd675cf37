// What the catalog says of this room, for Python.
#pragma once

#include "catalog/json.h"

namespace lowbit {

/// "presets": [{"name", "signed", "unsigned"}, ...], "thresholds": {...}, "slow_mean": "...",
/// "blocks": [...], "wrapper_prefixes": [...], "plan": {...}, "workspace": {...}. What a preset leaves
/// to the format is left out.
json::Fields policy_fields();

}  // namespace lowbit
