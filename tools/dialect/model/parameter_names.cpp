#include "dialect/model/parameter_names.h"

#include <algorithm>

#include "io/glob.h"
#include "policy/names.h"

namespace lowbit::ckpt {

bool name_fits(const std::string& name, const std::vector<std::string>& patterns) {
  const std::string clean = clean_name(name);
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return glob_matches(pattern, clean); });
}

void TensorsByName::add(const Leaf& leaf) {
  if (leaf.kind == Leaf::Kind::kTensor && !leaf.path.empty())
    named_.emplace_back(clean_name(leaf.name()), &leaf);
}

const Leaf* TensorsByName::find(const std::string& param) const {
  const std::string name = clean_name(param);
  const Leaf* found = nullptr;
  size_t length = 0;
  for (const auto& [full, leaf] : named_) {
    if (!full.ends_with(name)) continue;
    if (full.size() > name.size() && full[full.size() - name.size() - 1] != '.') continue;
    if (found == nullptr || full.size() < length) found = leaf, length = full.size();
  }
  return found;
}

}  // namespace lowbit::ckpt
