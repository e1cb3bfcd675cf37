#include "container/torch/tree.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "container/pickled/unread_tensor.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

class TreeReader {
 public:
  TreeReader(const Pickle& p, Storages& storages, Archive& archive, Manifest& manifest)
      : p_(p),
        storages_(storages),
        archive_(archive),
        manifest_(manifest),
        budget_(PickleBudget::of(p)),
        seen_(p.nodes.size()) {}

  Status read() {
    ASSIGN_OR_RETURN(file, archive_.file());
    left_ = limit_ = value_limit(p_, file->size());
    if (!p_.opaque_name(p_.root).empty())
      return bad(
          archive_.what() + ": is one object of " + printable(p_.opaque_name(p_.root)) +
          ", which only a program that has this class can load; save its state_dict() there");
    ASSIGN_OR_RETURN(held, look(p_.root, 0));
    static_cast<void>(held);
    RETURN_IF_ERROR(enter(p_.root));
    // The order of leaves: tensors and values are in two lists, and each was filled in order.
    for (const auto& [is_blob, index] : order_)
      manifest_.order.push_back(is_blob ? manifest_.tensors.size() + index : index);
    if (local_ > 0)
      manifest_.warnings.push_back(std::to_string(local_) +
                                   " tensors are one rank's part of a DTensor: only that part is "
                                   "in this file");
    for (const std::string& note : p_.notes) dropped_.insert(note);
    if (expanded_ > 0)
      manifest_.warnings.push_back(std::to_string(expanded_) +
                                   " tensors are expanded: one stored value stands for many "
                                   "elements");
    for (const std::string& dropped : dropped_)
      manifest_.warnings.push_back(dropped + " are not kept when this is written again");
    return fine();
  }

 private:
  /// A leaf counts for a few values.
  Status spend(uint64_t values) {
    if (values > left_)
      return too_large(archive_.what() + ": unfolds to too many values, more than " +
                       std::to_string(limit_) +
                       ", the limit for a file of its size; save long lists of numbers as tensors");
    left_ -= values;
    return fine();
  }

  /// What lies below a node.
  enum Below : uint8_t { kUnknown, kOpen, kPlain, kDicts, kTensors };

  std::string here() const { return archive_.what() + ": " + printable(flat_name(path_)); }

  /// Whether a tensor lies below a node, or (through lists alone) a dict; each node is visited
  /// once.
  Result<Below> look(NodeId node, int depth) {
    if (depth > Value::kMaxDepth)
      return bad(archive_.what() + ": is nested more than " + std::to_string(Value::kMaxDepth) +
                 " deep");
    if (seen_[node] == kOpen) return bad(archive_.what() + ": holds a container that holds itself");
    if (seen_[node] != kUnknown) return static_cast<Below>(seen_[node]);
    if (is_tensor(p_, node)) return mark(node, kTensors);
    const bool dict = p_.is(node, Kind::kDict);
    if (!dict && !p_.is(node, Kind::kList) && !p_.is(node, Kind::kTuple)) return mark(node, kPlain);
    seen_[node] = kOpen;
    Below all = dict ? kDicts : kPlain;
    for (const NodeId item : p_.items(node)) {
      ASSIGN_OR_RETURN(below, look(item, depth + 1));
      all = std::max(all, below);
    }
    // A tuple of dicts is one value, and so is what holds nothing but such tuples.
    if (p_.is(node, Kind::kTuple) && all == kDicts) all = kPlain;
    return mark(node, all);
  }
  Below mark(NodeId node, Below below) {
    seen_[node] = below;
    return below;
  }

  Status enter(NodeId node) {
    RETURN_IF_ERROR(spend(4));
    if (is_tensor(p_, node)) return tensor(node);
    const auto below = static_cast<Below>(seen_[node]);
    const auto items = p_.items(node);
    if (p_.is(node, Kind::kDict) && items.empty() && !p_.configuration(node)) {
      RETURN_IF_ERROR(hold(node));  // which may have attributes
      return leaf(Value{.kind = p_.ordered(node) ? Value::Kind::kOrdered : Value::Kind::kDict});
    }
    if (p_.is(node, Kind::kDict) && !p_.configuration(node)) {
      if (below == kTensors || has_plain_keys(items)) return dict(node);
    } else if (p_.is(node, Kind::kList) && below != kPlain) {
      return places(items, Key::Kind::kIndex);
    } else if (p_.is(node, Kind::kTuple) && below == kTensors) {
      return places(items, Key::Kind::kTupleIndex);
    }
    ASSIGN_OR_RETURN(value, plain_value(p_, node, here(), left_, budget_));
    RETURN_IF_ERROR(spend(value.count()));
    return leaf(std::move(value));
  }

  /// A leaf keeps the names of all dicts around it.
  Status spend_names() {
    uint64_t bytes = 0;
    for (const Key& key : path_) bytes += key.name.size();
    return budget_.spend_text(bytes, archive_.what());
  }

  Status leaf(Value value) {
    RETURN_IF_ERROR(spend_names());
    order_.emplace_back(true, manifest_.blobs.size());
    return archive_.add(manifest_, path_, std::move(value));
  }

  bool has_plain_keys(std::span<const NodeId> items) const {
    for (size_t i = 0; i + 1 < items.size(); i += 2) {
      if (!p_.is(items[i], Kind::kString) && !p_.is(items[i], Kind::kInt)) return false;
    }
    return true;
  }

  /// Keeps what is more than a dict.
  Status hold(NodeId node) {
    if (!p_.ordered(node)) return fine();
    DictInfo info{path_, true, {}};
    const NodeId attributes = p_.attributes(node);
    if (attributes != kNoNode) {
      ASSIGN_OR_RETURN(value,
                       plain_value(p_, attributes, here() + ": its attributes", left_, budget_));
      RETURN_IF_ERROR(spend(value.count()));
      if (value.is_dict() && !value.items.empty()) info.attributes = std::move(value);
    }
    manifest_.dicts.push_back(std::move(info));
    return fine();
  }

  Status dict(NodeId node) {
    RETURN_IF_ERROR(hold(node));
    const auto items = p_.items(node);
    if (const auto key = p_.repeated_key(node))
      return bad(here() + ": has the key " + printable(*key) + " twice");
    if (const auto key = p_.repeated_number(node))
      return bad(here() + ": has the key " + *key + " twice: Python takes 1, 1.0 and True for one");
    for (size_t i = 0; i + 1 < items.size(); i += 2) {
      if (p_.is(items[i], Kind::kString)) {
        path_.emplace_back(std::string(p_.text(items[i])));
      } else if (p_.is(items[i], Kind::kInt)) {
        path_.emplace_back(Key::Kind::kNumber, p_.integer(items[i]));
      } else {
        path_.emplace_back(odd_key(items[i], i / 2));
        RETURN_IF_ERROR(below_odd_key(items[i], items[i + 1]));
        path_.pop_back();
        continue;
      }
      RETURN_IF_ERROR(enter(items[i + 1]));
      path_.pop_back();
    }
    return fine();
  }

  /// What lies under a key that no path has; it is not looked into.
  Status below_odd_key(NodeId key, NodeId item) {
    constexpr const char* kKey = " under a key that is neither text nor a whole number";
    RETURN_IF_ERROR(spend(4));
    if (seen_[key] == kTensors || seen_[item] == kTensors)
      return leaf(Value::unread_tensor(std::string("a tensor") + kKey));
    const bool holds = p_.holds_tensor(key) || p_.holds_tensor(item);
    return leaf(Value{.kind = Value::Kind::kOpaque,
                      .integer = holds ? Value::kHolder : Value::kObject,
                      .text = std::string(holds ? "an object with tensors" : "a value") + kKey});
  }

  /// A name for it: as Python shows it where that is short, else its number in the dict.
  std::string odd_key(NodeId key, size_t number) const {
    constexpr size_t kLongest = 64;
    const std::string text = shown(key, 0);
    return text.empty() || text.size() > kLongest ? "key " + std::to_string(number) : text;
  }
  std::string shown(NodeId key, int depth) const {
    if (p_.is(key, Kind::kNone)) return "None";
    if (p_.is(key, Kind::kBool)) return p_.integer(key) != 0 ? "True" : "False";
    if (p_.is(key, Kind::kInt)) return std::to_string(p_.integer(key));
    if (p_.is(key, Kind::kFloat)) return fmt::format("{}", p_.real(key));
    if (p_.is(key, Kind::kString) && p_.text(key).size() < 32)
      return "'" + std::string(p_.text(key)) + "'";
    if (!p_.is(key, Kind::kTuple) || p_.items(key).size() > 8 || depth > 1) return "";
    std::string out;
    for (const NodeId item : p_.items(key)) {
      const std::string text = shown(item, depth + 1);
      if (text.empty()) return "";
      out += (out.empty() ? "" : ", ") + text;
    }
    return "(" + out + (p_.items(key).size() == 1 ? ",)" : ")");
  }

  Status places(std::span<const NodeId> items, Key::Kind kind) {
    for (size_t i = 0; i < items.size(); ++i) {
      path_.emplace_back(kind, static_cast<int64_t>(i));
      RETURN_IF_ERROR(enter(items[i]));
      path_.pop_back();
    }
    return fine();
  }

  /// What one rank has of a DTensor that is not whole here; else "".
  static std::string one_rank_of(const TensorNode& t) {
    if (!t.is_local || (t.shape == t.whole && t.share.empty())) return "";
    return (t.share.empty() ? shape_text(t.shape) : t.share) + " of a DTensor of " +
           shape_text(t.whole);
  }

  Status tensor(NodeId node) {
    if (std::string kind = unread_kind(p_, node); !kind.empty())
      return leaf(Value::unread_tensor(std::move(kind)));
    RETURN_IF_ERROR(spend_names());
    ASSIGN_OR_RETURN(t, read_tensor(p_, node, storages_, here()));
    const std::string one_rank = one_rank_of(t);
    local_ += !one_rank.empty();
    expanded_ += t.is_expanded;
    if (!t.dropped.empty()) dropped_.insert(t.dropped);
    order_.emplace_back(false, manifest_.tensors.size());
    Tensor out{{}, path_, t.dtype, std::move(t.shape), {}};
    out.alias = std::move(t.alias);
    out.gradient = t.gradient;
    out.one_rank = one_rank;
    return archive_.add(manifest_, std::move(out), std::move(t.stored));
  }

  const Pickle& p_;
  Storages& storages_;
  Archive& archive_;
  Manifest& manifest_;
  PickleBudget budget_;
  std::vector<uint8_t> seen_;
  uint64_t left_ = 0, limit_ = 0;
  Path path_;
  std::vector<std::pair<bool, size_t>> order_;
  uint64_t local_ = 0, expanded_ = 0;
  std::set<std::string> dropped_;
};

}  // namespace

Status read_tree(const Pickle& pickle, Storages& storages, Archive& archive, Manifest& manifest) {
  return TreeReader(pickle, storages, archive, manifest).read();
}

}  // namespace lowbit::ckpt
