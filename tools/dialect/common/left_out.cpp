#include "dialect/common/left_out.h"

#include <algorithm>
#include <map>
#include <set>

#include "dialect/common/document_leaves.h"
#include "io/text.h"

namespace lowbit::ckpt {

Status check_any_read(const OptimizerTree& tree, const Model& model) {
  if (std::any_of(model.params.begin(), model.params.end(),
                  [](const Param& p) { return !p.states.empty(); }))
    return fine();
  for (const Entry& entry : tree.params) {
    for (const auto& [name, leaf] : entry.leaves) {
      if (leaf->kind == Leaf::Kind::kValue || volume(leaf->shape) <= 1) continue;
      return bad(printable(leaf->name()) + ": is no state that " + model.dialect +
                 " writes, and nor is any other; leave --from out, or name another dialect");
    }
  }
  return fine();
}

std::vector<std::string> numbers_left_out(const Model& model, const Document& written) {
  // Other libraries' numbers are their own: what is read of them is in the states.
  if (model.dialect != "torch") return {};
  std::set<std::string> there;
  for (const Leaf& leaf : written.leaves) there.insert(flat_name(leaf.path));
  std::map<std::string, size_t> lost;
  for (const Param& p : model.params) {
    for (const auto& [name, value] : p.numbers) {
      if (name != "step" && !there.contains(flat_name(state_path(model, p, name)))) ++lost[name];
    }
  }
  std::vector<std::string> out;
  for (const auto& [name, count] : lost)
    out.push_back("'" + printable(name) + "' in the state of " + std::to_string(count) +
                  (count == 1 ? " parameter" : " parameters") +
                  " is not the optimizer's, and is left out");
  return out;
}

}  // namespace lowbit::ckpt
