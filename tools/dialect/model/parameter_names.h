// Patterns of parameters' names.
#pragma once

#include <string>
#include <vector>

namespace lowbit::ckpt {

/// Whether a parameter's name matches one of the patterns, by the rules of Python's fnmatch.
bool name_fits(const std::string& name, const std::vector<std::string>& patterns);

}  // namespace lowbit::ckpt
