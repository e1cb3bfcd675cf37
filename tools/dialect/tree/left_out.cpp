#include "dialect/tree/left_out.h"

#include <algorithm>
#include <map>
#include <set>

#include "dialect/numbers/document_leaves.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

bool is_of_a_state(const Param& param, const Leaf* leaf) {
  return std::ranges::any_of(param.states, [&](const State& s) {
    return std::ranges::find(s.leaves, leaf) != s.leaves.end();
  });
}

}  // namespace

Status check_any_read(const OptimizerTree& tree, const Model& model) {
  if (std::ranges::any_of(model.params, [](const Param& p) { return !p.states.empty(); }))
    return fine();
  for (const Entry& entry : tree.params) {
    for (const auto& [name, leaf] : entry.leaves) {
      if (leaf->kind == Leaf::Kind::kValue || volume(leaf->shape) <= 1) continue;
      if (name.ends_with("_qstate.qmap")) continue;  // of lpmm, which has no codes before a step
      return bad(printable(leaf->name()) + ": is not a state that " + model.dialect +
                 " writes, and nor is any other; leave --from out, or name another dialect");
    }
  }
  return fine();
}

std::vector<std::string> state_left_out(const OptimizerTree& tree, const Model& model,
                                        const Document& written) {
  std::set<std::string> there;
  for (const Leaf& leaf : written.leaves) there.insert(flat_name(leaf.path));
  std::map<std::string, size_t> lost;
  for (size_t i = 0; i < model.params.size(); ++i) {
    const Param& p = model.params[i];
    const auto is_lost = [&](const std::string& name) {
      return !there.contains(flat_name(state_path(model, p, name)));
    };
    // Other libraries' numbers are their own: what is read of them is in the states.
    for (const auto& [name, value] : p.numbers) {
      if (model.dialect == "torch" && name != "step" && is_lost(name)) ++lost[name];
    }
    // What is smaller than its parameter, such as a code's map, belongs to another state.
    for (const auto& [name, leaf] : tree.params[i].leaves) {
      const bool whole = leaf->kind == Leaf::Kind::kTensor && leaf->shape == p.shape &&
                         p.known_shape && volume(p.shape) > 1;
      if (whole && !is_of_a_state(p, leaf) && is_lost(name)) ++lost[name];
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
