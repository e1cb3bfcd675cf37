#include "dialect/tree/weights.h"

#include "policy/names.h"

namespace lowbit::ckpt {

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
