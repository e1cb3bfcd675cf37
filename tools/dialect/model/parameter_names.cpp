#include "dialect/model/parameter_names.h"

#include <algorithm>

#include "io/glob.h"
#include "policy/names.h"

namespace lowbit::ckpt {

bool name_fits(const std::string& name, const std::vector<std::string>& patterns) {
  const std::string clean = clean_name(name);
  return std::ranges::any_of(
      patterns, [&](const std::string& pattern) { return glob_matches(pattern, clean); });
}

}  // namespace lowbit::ckpt
