#include "dialect/tree/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "io/text.h"
#include "policy/names.h"

namespace lowbit::ckpt {
namespace {

/// What stands before the parameter's name in the name of its tensor, with the last dot.
std::string place_of(const std::string& full, const std::string& param) {
  const size_t n = full.size() - std::min(full.size(), param.size());
  if (full.ends_with(param) && (n == 0 || full[n - 1] == '.')) return full.substr(0, n);
  const std::string clean = clean_name(param);
  for (size_t dot = full.rfind('.'); dot != std::string::npos && dot > 0;
       dot = full.rfind('.', dot - 1)) {
    if (clean_name(full.substr(dot + 1)) == clean) return full.substr(0, dot + 1);
  }
  return "";
}

bool are_alike(const std::vector<const Leaf*>& leaves, Weights::Asked asked) {
  const Leaf& first = *leaves[0];
  const std::string memory = memory_of(first);
  return std::ranges::all_of(leaves, [&](const Leaf* leaf) {
    if (asked == Weights::Asked::kShape) return leaf->shape == first.shape;
    if (asked == Weights::Asked::kDtype) return leaf->dtype == first.dtype;
    return leaf == &first || (!memory.empty() && memory_of(*leaf) == memory);
  });
}

}  // namespace

std::string memory_of(const Leaf& leaf) {
  if (!leaf.tied.empty() || leaf.stored == nullptr || !leaf.stored->alias) return leaf.tied;
  const Alias& alias = *leaf.stored->alias;
  return fmt::format("{} {} {} {} {}", alias.first, leaf.dtype->name, shape_text(leaf.shape),
                     shape_text(alias.stride), alias.storage);
}

void TensorsByName::add(const Leaf& leaf) {
  if (leaf.kind != Leaf::Kind::kTensor || leaf.path.empty()) return;
  std::string name = clean_name(leaf.name());
  std::ranges::reverse(name);
  by_end_.emplace(std::move(name), leaves_.size());
  leaves_.push_back(&leaf);
}

std::vector<const Leaf*> TensorsByName::find(const std::string& param) const {
  std::string end = clean_name(param);
  std::ranges::reverse(end);
  std::map<size_t, std::string> places;  // by number of the leaf
  for (auto at = by_end_.lower_bound(end); at != by_end_.end() && at->first.starts_with(end);
       ++at) {
    if (at->first.size() == end.size() || at->first[end.size()] == '.')
      places.emplace(at->second, place_of(leaves_[at->second]->name(), param));
  }
  std::vector<const Leaf*> found;
  for (const auto& [number, place] : places) {
    const bool hidden = std::ranges::any_of(places, [&](const auto& other) {
      return place.size() > other.second.size() && place.starts_with(other.second);
    });
    if (!hidden) found.push_back(leaves_[number]);
  }
  return found;
}

Weights::Weights(const Document& document, const OptimizerTree& tree) {
  for (const Leaf* leaf : tree.rest) own_.add(*leaf);
  add_model(document.model.get());
  for (size_t i = 0; i < tree.weights.size(); ++i)
    by_order_.emplace(tree.params[i].name, tree.weights[i]);
}

Weights::Weights(const Model& model) {
  for (const Leaf& leaf : model.rest) own_.add(leaf);
  if (model.document != nullptr) add_model(model.document->model.get());
  for (size_t i = 0; i < model.weights.size(); ++i)
    by_order_.emplace(model.params[i].name, model.weights[i]);
}

Weights::Weights(const std::vector<const Leaf*>& leaves) : takes_model_(false) {
  for (const Leaf* leaf : leaves) own_.add(*leaf);
}

void Weights::add_model(const Document* model) {
  if (model == nullptr) return;
  for (const Leaf& leaf : model->leaves) model_.add(leaf);
}

Result<const Leaf*> Weights::find(const std::string& param, Asked asked) const {
  if (param.empty()) return nullptr;
  const std::vector<const Leaf*> own = own_.find(param);
  if (!own.empty() && are_alike(own, asked)) return own[0];
  // The user may have given the other checkpoint because this one holds several.
  ASSIGN_OR_RETURN(other, find_in_model(param, asked));
  if (other == nullptr && !own.empty()) return several(param, own, false);
  return other;
}

Result<const Leaf*> Weights::find_in_model(const std::string& param, Asked asked) const {
  if (const auto at = by_order_.find(param); at != by_order_.end()) return at->second;
  const std::vector<const Leaf*> found = model_.find(param);
  if (found.empty()) return nullptr;
  if (!are_alike(found, asked)) return several(param, found, true);
  return found[0];
}

Error Weights::several(const std::string& param, const std::vector<const Leaf*>& found,
                       bool of_model) const {
  constexpr size_t kShown = 5;
  std::set<std::string> places;
  for (const Leaf* leaf : found) places.insert(place_of(leaf->name(), param));
  const bool apart = places.size() == found.size() && !places.contains("");
  std::vector<std::string> names, patterns;
  for (size_t i = 0; i < std::min(found.size(), kShown); ++i) {
    const std::string name = found[i]->name();
    names.push_back(printable(name));
    patterns.push_back(
        fmt::format("--exclude '{}'", printable(apart ? place_of(name, param) + "*" : name)));
  }
  std::string text =
      fmt::format("{}: its weight may be any of {}", printable(param), fmt::join(names, ", "));
  if (found.size() > kShown) text += fmt::format(" and {} more", found.size() - kShown);
  if (of_model) return bad(text + " in --model; give a file that has one of them");
  text += fmt::format("; leave out all but the one that the optimizer steps, with {}",
                      fmt::join(patterns, " or "));
  return bad(text + (takes_model_ ? ", or give a file with that one as --model PATH" : ""));
}

}  // namespace lowbit::ckpt
