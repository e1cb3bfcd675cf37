// Recognizes optimizers whose states are named like another's, by settings and numbers.
#pragma once

#include <string>
#include <vector>

#include "dialect/model/model.h"

namespace lowbit::ckpt {

/// The optimizer that wrote the model, such as "FusedLAMB of Apex", if a setting or a number of its
/// parameters shows that its update is not that of `algorithm`; else empty.
std::string other_rule(const std::string& algorithm, const Model& model);

}  // namespace lowbit::ckpt
