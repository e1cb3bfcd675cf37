#include "pickle/reach.h"

namespace lowbit::ckpt {
namespace {

/// Whether a node is a tensor, or the storage of one.
bool is_data(const Pickle& p, NodeId id) {
  if (p.is(id, Kind::kPersistent)) {
    const NodeId kind = p.item(p.item(id, 0), 0);
    return p.is(kind, Kind::kString) && p.text(kind) == "storage";
  }
  if (p.is(id, Kind::kCall)) return p.global(id)->name.starts_with("_rebuild_");
  const std::string_view name = p.opaque_name(id);
  return name.starts_with("torch._utils._rebuild_") || name.starts_with("torch._tensor._rebuild_");
}

/// Calls `use(holder, held)` for all that a node holds directly.
template <class Use>
void for_edges(const Pickle& p, const Given& given, const Use& use) {
  for (NodeId id = 0; id < p.nodes.size(); ++id) {
    for (const NodeId item : p.items(id)) {
      if (item != kNoNode) use(id, item);
    }
    if (p.attributes(id) != kNoNode) use(id, p.attributes(id));
  }
  for (const auto& [object, held] : given) use(object, held);
}

}  // namespace

std::vector<bool> tensor_holders(const Pickle& p, const Given& given) {
  // From the tensors up, so that each node is visited once and a circle ends.
  std::vector<uint32_t> start(p.nodes.size() + 1);  // of a node's holders
  for_edges(p, given, [&](NodeId, NodeId held) { ++start[held + 1]; });
  for (size_t i = 1; i < start.size(); ++i) start[i] += start[i - 1];
  std::vector<NodeId> holders(start.back());
  std::vector<uint32_t> next(start.begin(), start.end() - 1);
  for_edges(p, given, [&](NodeId holder, NodeId held) { holders[next[held]++] = holder; });
  std::vector<bool> out(p.nodes.size());
  std::vector<NodeId> open;
  const auto add = [&](NodeId id) {
    if (out[id]) return;
    out[id] = true;
    open.push_back(id);
  };
  for (NodeId id = 0; id < p.nodes.size(); ++id) {
    if (is_data(p, id)) add(id);
  }
  while (!open.empty()) {
    const NodeId id = open.back();
    open.pop_back();
    for (uint32_t i = start[id]; i < start[id + 1]; ++i) add(holders[i]);
  }
  return out;
}

}  // namespace lowbit::ckpt
