#include "dialect/common/weights.h"

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

Weights::Weights(const Document& document, const OptimizerTree& tree) {
  for (const Leaf* leaf : tree.rest) add(*leaf);
  if (document.model == nullptr) return;
  for (const Leaf& leaf : document.model->leaves) add(leaf);
}

void Weights::add(const Leaf& leaf) {
  if (leaf.kind != Leaf::Kind::kTensor) return;
  const auto put = [&](const std::string& name) {
    const auto [at, fresh] = by_name_.try_emplace(clean_name(name), &leaf);
    if (!fresh && at->second != nullptr && at->second->shape != leaf.shape) at->second = nullptr;
  };
  // Below any number of keys: ("model", "layers.0.weight") and ("layers.0.weight").
  const std::string flat = leaf.name();
  put(flat);
  for (size_t i = 0, dot; i < 2; ++i) {
    dot = i == 0 ? flat.find('.') : flat.find('.', flat.find('.') + 1);
    if (dot == std::string::npos) break;
    put(flat.substr(dot + 1));
  }
}

const Leaf* Weights::find(const Entry& entry) const {
  if (entry.name.empty()) return nullptr;
  const auto at = by_name_.find(clean_name(entry.name));
  return at == by_name_.end() ? nullptr : at->second;
}

}  // namespace lowbit::ckpt
