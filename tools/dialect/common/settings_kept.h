// What becomes of a group's settings in another dialect.
#pragma once

#include "dialect/common/dialect.h"

namespace lowbit::ckpt {

/// Warns of settings that have an effect and that `to` does not keep, and of a weight decay that
/// is another there, or is not known. An error where the update would go another way, or where the
/// settings are those of an optimizer that `to` does not have.
Status check_settings(const Model& model, const Dialect& to, DialectReport& report);

}  // namespace lowbit::ckpt
