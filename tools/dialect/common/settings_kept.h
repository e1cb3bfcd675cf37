// What becomes of a group's settings in another dialect.
#pragma once

#include <optional>

#include "dialect/common/dialect.h"

namespace lowbit::ckpt {

/// Whether a group of Adam's decays the weights and not the gradient; empty where its file does not
/// say.
std::optional<bool> decouples(const Model& model, const Group& group);
/// Warns of settings that have an effect and that `to` does not keep, and of a weight decay that
/// is another there, or is not known. An error where the update would go another way, or where the
/// settings are those of an optimizer that `to` does not have.
Status check_settings(const Model& model, const Dialect& to, DialectReport& report);

}  // namespace lowbit::ckpt
