#include "dialect/requantize/master.h"

#include <map>
#include <set>

#include "dialect/numbers/document_leaves.h"
#include "dialect/numbers/floats.h"
#include "dialect/tree/optimizer_tree.h"
#include "dialect/tree/weights.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// Where in a path the lists of Apex's masters begin; npos where they do not.
size_t list_of_masters(const Path& path) {
  for (size_t i = 0; i + 2 <= path.size(); ++i) {
    const std::string key = path[i].text();
    if (key == "fp32_from_fp16" || key == "fp32_from_fp16_params" ||
        key == "fp32_from_float16_groups")
      return i;
  }
  return std::string::npos;
}

/// A master weight and its parameter.
using Masters = std::vector<std::pair<const Leaf*, const Entry*>>;

/// The master weights in the parameters' state, and those of Apex's `lists`, which go by position
/// in the groups.
Result<Masters> masters_of(const OptimizerTree& tree, const std::vector<const Leaf*>& lists) {
  Masters masters;
  for (const Entry& entry : tree.params) {
    for (const auto& [name, leaf] : entry.leaves) {
      if (is_master(name)) masters.emplace_back(leaf, &entry);
    }
  }
  for (const Leaf* leaf : lists) {
    const size_t at = list_of_masters(leaf->path);
    const std::string name = printable(leaf->name());
    if (leaf->kind != Leaf::Kind::kTensor || leaf->path.size() != at + 3)
      return bad(name + ": master weights are lists of tensors, one list for each group");
    const auto g = static_cast<size_t>(leaf->path[at + 1].number);
    const auto i = static_cast<size_t>(leaf->path[at + 2].number);
    if (leaf->path[at + 1].is_name() || leaf->path[at + 2].is_name() || g >= tree.groups.size() ||
        i >= tree.groups[g].params.size())
      return bad(name + ": is the master weight of a parameter that no group of the optimizer has");
    masters.emplace_back(leaf, &tree.params[tree.groups[g].params[i]]);
  }
  return masters;
}

/// The weight that each master replaces: weight, master.
Result<std::map<const Leaf*, const Leaf*>> weights_of_masters(const OptimizerTree& tree,
                                                              const Masters& masters) {
  std::vector<const Leaf*> others = tree.rest;
  std::erase_if(others,
                [](const Leaf* l) { return list_of_masters(l->path) != std::string::npos; });
  const Weights weights(others);
  std::map<const Leaf*, const Leaf*> replaced;
  for (const auto& [master, entry] : masters) {
    const std::string what = printable(master->name());
    if (!is_float32(*master)) return bad(what + ": is not a float32 tensor, as master weights are");
    if (entry->name.empty())
      return bad(what + ": is the master weight of " + shown(*entry) +
                 ", and the checkpoint does not tell its name: save the optimizer by names "
                 "(torch.distributed.checkpoint.state_dict.get_optimizer_state_dict) or with "
                 "param_names in its groups");
    ASSIGN_OR_RETURN(weight, weights.find(entry->name, Weights::Asked::kValues));
    if (weight == nullptr) return bad(what + ": the checkpoint has no weight " + shown(*entry));
    if (weight->shape != master->shape)
      return bad(what + ": has the shape " + shape_text(master->shape) + ", its weight " +
                 shape_text(weight->shape));
    if (!replaced.emplace(weight, master).second)
      return bad(what + ": is the second master weight of " + printable(weight->name()));
  }
  return replaced;
}

/// The same for weights that are tied to these. The optimizer names one of them, and torch loads
/// all: the last wins.
void add_tied(const OptimizerTree& tree, std::map<const Leaf*, const Leaf*>& replaced) {
  std::map<std::string, const Leaf*> by_memory;
  for (const auto& [weight, master] : replaced) {
    if (std::string memory = memory_of(*weight); !memory.empty())
      by_memory.emplace(std::move(memory), master);
  }
  for (const Leaf* leaf : tree.rest) {
    const auto at = by_memory.find(memory_of(*leaf));
    if (at != by_memory.end()) replaced.emplace(leaf, at->second);
  }
}

}  // namespace

bool is_master(std::string_view name) {
  for (const char* known :
       {"master_param", "master_params", "master_weight", "master_weights", "master"}) {
    if (name == known) return true;
  }
  return false;
}

Result<Document> with_masters(Document document, DialectReport& report) {
  std::vector<const Leaf*> lists;
  for (const Leaf& leaf : document.leaves) {
    if (list_of_masters(leaf.path) != std::string::npos) lists.push_back(&leaf);
  }
  OptimizerTree tree;
  if (has_optimizer_tree(document)) {
    ASSIGN_OR_RETURN(found, optimizer_tree_of(document));
    tree = std::move(found);
  }
  ASSIGN_OR_RETURN(masters, masters_of(tree, lists));
  if (masters.empty()) return document;
  ASSIGN_OR_RETURN(replaced, weights_of_masters(tree, masters));
  add_tied(tree, replaced);
  std::set<const Leaf*> dropped;
  std::set<const Tensor*> views;  // of a tree that arranges the document differently
  std::set<const Leaf*> shared;   // masters that several weights get
  for (const auto& [weight, master] : replaced) {
    if (!dropped.insert(master).second) shared.insert(master);
    if (tree.view != nullptr && master->stored != nullptr) views.insert(master->stored);
  }
  report.warnings.push_back(std::to_string(dropped.size()) +
                            " float32 master weights replaced the model's weights");
  Document out = document;
  out.leaves.clear();
  for (const Leaf& leaf : document.leaves) {
    if (dropped.contains(&leaf) || (leaf.stored != nullptr && views.contains(leaf.stored)))
      continue;
    out.leaves.push_back(leaf);
    const auto at = replaced.find(&leaf);
    if (at == replaced.end()) continue;
    const Leaf& master = *at->second;
    Leaf& weight = out.leaves.back();
    weight.dtype = master.dtype;
    weight.source = master.source;
    weight.stored = nullptr;
    if (shared.contains(&master)) weight.tied = flat_name(master.path);
  }
  return out;
}

}  // namespace lowbit::ckpt
