// Whether a path lies in a folder.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>

namespace lowbit::ckpt {

/// Whether `inner` is `outer` or lies in it, wherever links lead.
inline bool inside(const std::string& inner, const std::string& outer) {
  std::error_code error;
  const auto a = std::filesystem::weakly_canonical(inner, error),
             b = std::filesystem::weakly_canonical(outer, error);
  if (error) return false;
  const auto [end, ignored] = std::mismatch(b.begin(), b.end(), a.begin(), a.end());
  return end == b.end();
}

}  // namespace lowbit::ckpt
