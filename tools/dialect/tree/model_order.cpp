#include "dialect/tree/model_order.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "dialect/tree/optimizer_root.h"
#include "dialect/tree/weights.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// Whether a module keeps a tensor of that name and dtype as a buffer: torch's norms do, and no
/// optimizer is given whole numbers.
bool is_buffer(const Leaf& leaf) {
  const std::string name = leaf.path.back().text();
  const std::string_view dtype = leaf.dtype->name;
  return name.ends_with("running_mean") || name.ends_with("running_var") ||
         !(dtype.starts_with("float") || dtype.starts_with("bfloat"));
}

/// Parameters of one dict of tensors, in its order; a tied one by its first name.
struct ModuleWeights {
  Path path;
  std::vector<const Leaf*> params;
  std::set<std::string> memories = {};  // of params
};

std::vector<ModuleWeights> weights_of(const Document& model) {
  std::vector<Path> roots;
  for (const OptimizerRoot& root : optimizer_roots(model)) {
    for (const char* part : {"state", "param_groups"}) {
      roots.push_back(root.path);
      roots.back().emplace_back(part);
    }
  }
  std::vector<ModuleWeights> out;
  for (const Leaf& leaf : model.leaves) {
    if (leaf.kind != Leaf::Kind::kTensor || leaf.path.empty() || is_buffer(leaf)) continue;
    if (std::ranges::any_of(roots, [&](const Path& root) { return is_below(leaf.path, root); }))
      continue;
    const Path above(leaf.path.begin(), leaf.path.end() - 1);
    auto at = std::ranges::find_if(out, [&](const ModuleWeights& w) { return w.path == above; });
    if (at == out.end()) at = out.insert(out.end(), {above, {}});
    const std::string memory = memory_of(leaf);
    if (memory.empty() || at->memories.insert(memory).second) at->params.push_back(&leaf);
  }
  return out;
}

/// Whether the dict is one that a module's state_dict() made, with its `_metadata`: its keys are in
/// the module's own order. Conversions that lose the order lose that mark too.
bool made_by_module(const Document& model, const Path& path) {
  return std::ranges::any_of(model.dicts, [&](const DictInfo& info) {
    return info.path == path && info.attributes.is_dict() &&
           info.attributes.find("_metadata") != nullptr;
  });
}

/// Two weights of one size, where the keys of each dtype are sorted: a file that was converted by
/// name has them so, and sizes do not tell whether the model has another order.
std::optional<std::pair<const Leaf*, const Leaf*>> sorted_by_name(const ModuleWeights& weights) {
  std::map<const Dtype*, std::string> last;
  std::map<uint64_t, const Leaf*> by_size;
  std::optional<std::pair<const Leaf*, const Leaf*>> found;
  for (const Leaf* leaf : weights.params) {
    std::string name = leaf->path.back().text();
    const auto [before, is_first] = last.try_emplace(leaf->dtype, name);
    if (!is_first && name < before->second) return std::nullopt;
    before->second = std::move(name);
    const auto [same, is_new] = by_size.try_emplace(volume(leaf->shape), leaf);
    if (!is_new && !found) found.emplace(same->second, leaf);
  }
  return found;
}

/// Puts the parameters that a CPUOffloadOptimizer left on the device, the smaller ones at the end,
/// between the others, as the weights lie.
Status put_in_order(const std::vector<const Leaf*>& weights, OptimizerTree& tree) {
  std::vector<uint64_t> sizes;
  for (const Leaf* weight : weights) sizes.push_back(volume(weight->shape));
  std::ranges::sort(sizes);
  const uint64_t least = sizes[tree.on_device];  // of the offloaded ones
  if (sizes[tree.on_device - 1] == least)
    return bad("its optimizer is torchao's CPUOffloadOptimizer with " +
               std::to_string(tree.on_device) +
               " parameters on the device, which are the smallest, and --model has more of that "
               "size");
  std::vector<Entry> entries;
  size_t large = 0, small = tree.params.size() - tree.on_device;
  for (const Leaf* weight : weights) {
    entries.push_back(std::move(tree.params[volume(weight->shape) < least ? small++ : large++]));
    entries.back().index = static_cast<int64_t>(entries.size()) - 1;
  }
  tree.params = std::move(entries);
  return fine();
}

}  // namespace

Status name_by_model(const Document& document, OptimizerTree& tree) {
  if (document.model == nullptr || !tree.numbered || tree.params.empty()) return fine();
  for (const Entry& entry : tree.params) {
    if (!entry.name.empty()) return fine();
  }
  const size_t count = tree.params.size();
  const std::string model = printable(document.model->manifest->path);
  const std::string what = "the parameters are numbered, 0 to " + std::to_string(count - 1) + ", ";
  const std::string advice =
      "; which is which cannot be known: save the optimizer again with names (its "
      "constructor takes model.named_parameters()), or leave --model out and keep the numbers";
  if (tree.groups.size() > 1)
    return bad(what + "in " + std::to_string(tree.groups.size()) +
               " groups, which follow no order that " + model + " tells" + advice);
  const ContainerKind kind = document.model->manifest->kind;
  if (kind != ContainerKind::kTorch && kind != ContainerKind::kLegacy)
    return bad(what + "and " + model + " (" + container_name(kind) +
               ") does not keep the order of the model; give what the program itself saves with "
               "torch.save(model.state_dict()), since a file converted from this one has no order "
               "of the model either" +
               advice);
  const std::vector<ModuleWeights> all = weights_of(*document.model);
  const ModuleWeights* found = nullptr;
  std::string said;
  for (const ModuleWeights& weights : all) {
    said += (said.empty() ? "" : ", ") + std::to_string(weights.params.size()) + " under '" +
            printable(flat_name(weights.path)) + "'";
    if (weights.params.size() != count) continue;
    if (found != nullptr)
      return bad(what + "and " + model + " has as many weights under '" +
                 printable(flat_name(found->path)) + "' and '" +
                 printable(flat_name(weights.path)) + "'; give a file with those of one model");
    found = &weights;
  }
  if (found == nullptr)
    return bad(what + "and " + model + " has " +
               (said.empty() ? "no weights" : said + " (" + "without buffers, tied weights once)") +
               advice);
  const auto alike = sorted_by_name(*found);
  if (alike && !made_by_module(*document.model, found->path))
    return bad(what + "and " + model +
               " has the weights sorted by name, as converted files do, which may not be the order "
               "of the model: '" +
               printable(alike->first->path.back().text()) + "' and '" +
               printable(alike->second->path.back().text()) +
               "' have one size, so nothing tells which comes first; give what the program itself "
               "saves with torch.save(model.state_dict()), in the order of model.parameters()");
  if (tree.on_device > 0) RETURN_IF_ERROR(put_in_order(found->params, tree));
  for (size_t i = 0; i < count; ++i) {
    tree.params[i].name = found->params[i]->path.back().text();
    tree.weights.push_back(found->params[i]);
  }
  for (Group& group : tree.groups) {
    Value names = Value::list({});
    for (const size_t p : group.params) names.items.push_back(Value::words(tree.params[p].name));
    std::erase_if(group.settings, [](const auto& s) { return s.first == "param_names"; });
    group.settings.emplace_back("param_names", std::move(names));
  }
  return fine();
}

Status check_order(const Model& model) {
  for (size_t i = 0; i < model.weights.size(); ++i) {
    const Param& p = model.params[i];
    const Leaf& weight = *model.weights[i];
    if (!p.known_shape || p.shape == weight.shape) continue;
    return bad("parameter " + std::to_string(p.index) + " has the shape " + shape_text(p.shape) +
               ", and " + printable(weight.name()) + ", which --model has at that position, " +
               shape_text(weight.shape) + ": they are of other models, or in another order");
  }
  return fine();
}

}  // namespace lowbit::ckpt
