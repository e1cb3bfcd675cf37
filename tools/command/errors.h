// Lines for people, on standard error.
#pragma once

#include <cstdio>
#include <string>

namespace lowbit::ckpt {

/// Prints it where that can be done: a log on a full disk changes no exit code.
inline void print_error(const std::string& text) { std::fputs(text.c_str(), stderr); }

}  // namespace lowbit::ckpt
