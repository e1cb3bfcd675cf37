#include "dialect/tree/number_keys.h"

#include <map>
#include <string>
#include <vector>

#include "dialect/tree/optimizer_root.h"

namespace lowbit::ckpt {
namespace {

/// The numbers in `params` of the groups below a root, by their text.
std::map<std::string, int64_t> numbered_params(const Document& document, const Path& root) {
  std::map<std::string, int64_t> out;
  const size_t n = root.size();
  for (const Leaf& leaf : document.leaves) {
    const bool params = leaf.kind == Leaf::Kind::kValue && leaf.path.size() >= n + 3 &&
                        leaf.path[n].text() == "param_groups" &&
                        leaf.path[n + 2].text() == "params" && is_below(leaf.path, root);
    if (!params) continue;
    const auto add = [&out](const Value& id) {
      if (id.is(Value::Kind::kInt)) out.emplace(std::to_string(id.integer), id.integer);
    };
    add(leaf.value);  // torch flattens some lists
    for (const Value& id : leaf.value.items) add(id);
  }
  return out;
}

}  // namespace

uint64_t restore_number_keys(Document& document) {
  uint64_t changed = 0;
  for (const OptimizerRoot& root : optimizer_roots(document)) {
    const std::map<std::string, int64_t> numbers = numbered_params(document, root.path);
    const size_t n = root.path.size();
    std::map<std::string, bool> met;
    const auto restore = [&](Path& path) {
      if (path.size() < n + 2 || path[n].text() != "state" || !path[n + 1].is_name() ||
          !is_below(path, root.path))
        return;
      const auto number = numbers.find(path[n + 1].name);
      if (number == numbers.end()) return;
      met.emplace(number->first, true);
      path[n + 1] = Key(Key::Kind::kNumber, number->second);
    };
    for (Leaf& leaf : document.leaves) restore(leaf.path);
    for (DictInfo& info : document.dicts) restore(info.path);
    changed += met.size();
  }
  return changed;
}

}  // namespace lowbit::ckpt
