// Objects of classes that are not on the allowlist, and what functions that are not give: they may
// be named, and stay unread. Nothing is called, so what they are does not matter.
#pragma once

#include <string>
#include <string_view>

namespace lowbit::ckpt {

/// Whether a global may be named: an ordinary Python name, and of no module that reaches the
/// system (os, subprocess, builtins, ...).
bool may_be_named(std::string_view module, std::string_view name);

}  // namespace lowbit::ckpt
