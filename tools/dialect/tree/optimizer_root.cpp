#include "dialect/tree/optimizer_root.h"

#include "dialect/megatron_view/megatron.h"

#include <algorithm>
#include <map>
#include <string>
#include <string_view>

namespace lowbit::ckpt {

std::string id_of(const Path& path, size_t length) {
  std::string s;
  for (size_t i = 0; i < length; ++i) s += path[i].text() + '\x1f';
  return s;
}

namespace {

/// Names that only an optimizer's state has, where no groups tell that it is one.
bool is_state_name(std::string_view name) {
  for (const char* known : {"step", "exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum",
                            "state1", "row_var", "variance"}) {
    if (name == known) return true;
  }
  return false;
}

}  // namespace

Path nested_path(const Document& document, const Leaf& leaf) {
  if (document.manifest == nullptr || document.manifest->has_paths || leaf.path.size() != 1 ||
      !leaf.path[0].is_name())
    return leaf.path;
  const std::string& name = leaf.path[0].name;
  size_t at = std::string::npos;
  for (const char* word : {"state.", "param_groups."}) {
    size_t found = name.starts_with(word) ? 0 : name.find(std::string(".") + word);
    if (found != std::string::npos && found != 0) ++found;
    at = std::min(at, found);
  }
  if (at == std::string::npos) return leaf.path;
  Path out;
  for (size_t begin = 0; begin < at;) {
    const size_t end = name.find('.', begin);
    out.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  out.push_back(name.substr(at));
  return out;
}

namespace {

/// With groups, and without them.
std::pair<std::vector<OptimizerRoot>, std::vector<OptimizerRoot>> all_roots(
    const Document& document) {
  std::map<std::string, OptimizerRoot> found;
  for (const Leaf& leaf : document.leaves) {
    const Path path = nested_path(document, leaf);
    for (size_t i = 0; i < path.size(); ++i) {
      if (!path[i].is_name()) continue;
      const std::string& key = path[i].name;
      const bool groups = key == "param_groups" || key.starts_with("param_groups.");
      const bool state = (key == "state" && i + 2 < path.size()) || key.starts_with("state.");
      if (!groups && !state) continue;
      OptimizerRoot& root = found[id_of(path, i)];
      root.path.assign(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(i));
      root.groups |= groups;
      const std::string last = path.back().text();
      root.states |= state && is_state_name(last.substr(last.rfind('.') + 1));
    }
  }
  std::vector<OptimizerRoot> with_groups, others;
  for (auto& [id, root] : found) {
    if (root.groups) with_groups.push_back(root);
    if (!root.groups && root.states) others.push_back(root);
  }
  return {with_groups, others};
}

}  // namespace

std::vector<OptimizerRoot> optimizer_roots(const Document& document) {
  if (is_megatron(document)) return {{{"optimizer"}, true, true}};
  auto [with_groups, others] = all_roots(document);
  return with_groups.empty() ? others : with_groups;
}

std::vector<OptimizerRoot> other_roots(const Document& document) {
  auto [with_groups, others] = all_roots(document);
  return with_groups.empty() ? std::vector<OptimizerRoot>() : others;
}

}  // namespace lowbit::ckpt
