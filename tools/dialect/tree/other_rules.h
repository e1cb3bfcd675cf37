// Optimizers that no dialect here has, and whose states have the names of another's.
#pragma once

#include <string>
#include <vector>

#include "dialect/model/model.h"

namespace lowbit::ckpt {

/// Whose optimizer these groups are of, where the states have the names of `algorithm` and a
/// setting tells that the update is another: "FusedLAMB of Apex". "" where none does.
std::string other_rule(const std::string& algorithm, const std::vector<Group>& groups);

}  // namespace lowbit::ckpt
