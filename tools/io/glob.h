// Patterns of names, as Python's fnmatch.fnmatchcase reads them.
#pragma once

#include <string_view>

namespace lowbit::ckpt {

/// Whether a pattern fits the whole name: * is any text, ? one character, [ab] or [a-z] one of a
/// set, [!ab] one that is not in it. A '[' without its ']' is a plain character, and so are '\' and
/// '^'. Characters are UTF-8.
bool glob_matches(std::string_view pattern, std::string_view name);

}  // namespace lowbit::ckpt
