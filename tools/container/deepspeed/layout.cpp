#include "container/deepspeed/layout.h"

#include <algorithm>
#include <map>

#include "container/manifest/box.h"

namespace lowbit::ckpt {
namespace {

struct Piece {
  std::string name;
  uint64_t count, padding;
};

/// The slices that the ranks have of parameters which lie one after the other.
std::vector<std::vector<Fragment>> cut(const std::vector<Piece>& order,
                                       const std::vector<RankVector>& ranks) {
  std::vector<std::vector<Fragment>> out(ranks.size());
  size_t rank = 0;
  uint64_t at = 0, begin = 0;
  for (const Piece& piece : order) {
    uint64_t first = at;
    const uint64_t end = at + piece.count;
    while (first < end) {
      while (rank < ranks.size() && first >= begin + ranks[rank].length)
        begin += ranks[rank++].length;
      if (rank == ranks.size()) return out;
      const uint64_t last = std::min(end, begin + ranks[rank].length);
      out[rank].push_back({piece.name, first - begin, last - first});
      first = last;
    }
    at = end + piece.padding;
  }
  return out;
}

bool same(const std::vector<std::vector<Fragment>>& cuts, const std::vector<RankVector>& ranks) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (cuts[i] != ranks[i].fragments) return false;
  }
  return true;
}

/// `order` as DeepSpeed deals it out to so many ranks.
std::vector<Piece> dealt_out(const std::vector<Piece>& order, size_t ranks) {
  std::vector<Piece> out;
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (size_t i = rank; i < order.size(); i += ranks) out.push_back(order[i]);
  }
  return out;
}

}  // namespace

Lengths lengths_of(const FlatGroup& group) {
  Lengths out;
  for (const auto& [name, shape] : group) out.emplace(name, volume(shape));
  return out;
}

Result<std::vector<uint64_t>> read_paddings(const PartFile& file, size_t group, size_t count) {
  std::vector<uint64_t> out;
  const Value* said = file.value({"optimizer_state_dict", "param_alignment_paddings"});
  if (said == nullptr || said->is(Value::Kind::kNone)) return out;
  if (said->is(Value::Kind::kList) && group < said->items.size()) {
    for (const Value& padding : said->items[group].items) {
      if (padding.is(Value::Kind::kInt) && padding.integer >= 0)
        out.push_back(static_cast<uint64_t>(padding.integer));
    }
  }
  if (out.size() == count) return out;
  return bad(file.what() + ": its param_alignment_paddings have no " + std::to_string(count) +
             " numbers for the parameters of group " + std::to_string(group));
}

bool lie_in_order(const FlatGroup& group, const std::vector<uint64_t>& paddings,
                  std::vector<RankVector>& ranks) {
  std::vector<Piece> order;
  std::map<std::string, Piece> by_name;
  for (size_t i = 0; i < group.size(); ++i) {
    order.push_back({group[i].first, volume(group[i].second), paddings.empty() ? 0 : paddings[i]});
    by_name.emplace(group[i].first, order.back());
  }
  for (RankVector& rank : ranks)
    std::ranges::sort(rank.fragments,
                      [](const Fragment& a, const Fragment& b) { return a.first < b.first; });
  auto cuts = cut(order, ranks);
  if (same(cuts, ranks)) return true;
  std::vector<Piece> before;
  for (const RankVector& rank : ranks) {
    for (const Fragment& f : rank.fragments) {
      const auto found = by_name.extract(f.name);
      if (!found.empty()) before.push_back(found.mapped());
    }
  }
  const auto named = [](const std::vector<Piece>& pieces) {
    std::vector<std::string> out;
    for (const Piece& piece : pieces) out.push_back(piece.name);
    return out;
  };
  if (!same(cut(before, ranks), ranks) || named(dealt_out(before, ranks.size())) != named(order))
    return false;
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i].fragments = std::move(cuts[i]);
  return true;
}

}  // namespace lowbit::ckpt
