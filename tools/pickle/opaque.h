// Objects of classes that are not on the allowlist: they may be named, and stay unread.
#pragma once

#include <string>
#include <string_view>

namespace lowbit::ckpt {

/// Whether a global may be named: an ordinary Python name, and of no module that reaches the
/// system (os, subprocess, builtins, ...).
bool may_be_named(std::string_view module, std::string_view name);
/// Whether a call of it is the construction of an object, by its name: a class begins with a
/// capital letter. What a function gives is known only to who runs it.
bool is_constructor(std::string_view module, std::string_view name);

}  // namespace lowbit::ckpt
