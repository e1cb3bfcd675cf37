// What `lowbit-ckpt --version` prints.
#pragma once

#include <string>

namespace lowbit::ckpt {

/// The version on the first line; then the license, and the libraries of the program with theirs.
std::string version_text();

}  // namespace lowbit::ckpt
