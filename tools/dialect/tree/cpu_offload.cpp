#include "dialect/tree/cpu_offload.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>

#include "dialect/numbers/numbers.h"
#include "dialect/tree/nested_value.h"
#include "io/text.h"
#include "pickle/numpy_value.h"

namespace lowbit::ckpt {
namespace {

constexpr std::string_view kOffloaded = "offloaded", kOnDevice = "on-device";
constexpr int64_t kMaxParams = 1 << 20;

/// The number of a key, of text too: a directory keeps no other keys. -1 where it is none.
int64_t number_of_key(const Key& key) {
  const std::string text = key.text();
  int64_t number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool fits = error == std::errc() && end == text.data() + text.size();
  return fits && number >= 0 && number < kMaxParams ? number : -1;
}

/// The path around one of the optimizers "offloaded.N".
std::optional<Path> around_offloaded(const Path& root) {
  const size_t n = root.size();
  if (n < 2 || root[n - 2].text() != kOffloaded || number_of_key(root[n - 1]) < 0)
    return std::nullopt;
  return Path(root.begin(), root.end() - 2);
}

/// One of the optimizers.
struct Part {
  std::vector<std::pair<Path, const Leaf*>> state;  // by the path below "state"
  NestedValue groups{Value::Kind::kList};
};

class Joining {
 public:
  Joining(const Document& document, const Path& root) : document_(document), root_(root) {}

  Result<OffloadView> run() {
    const size_t n = root_.size();
    for (const Leaf& leaf : document_.leaves) {
      const bool inside = leaf.path.size() > n + 1 && is_below(leaf.path, root_);
      const std::string key = inside ? leaf.path[n].text() : "";
      const bool listed = key == kOffloaded && leaf.path.size() > n + 2;
      const int64_t number = listed ? number_of_key(leaf.path[n + 1]) : -1;
      if (number >= 0) {
        RETURN_IF_ERROR(take(offloaded_[number], n + 2, leaf));
      } else if (key == kOnDevice) {
        RETURN_IF_ERROR(take(on_device_, n + 1, leaf));
      } else {
        out_.rest.push_back(&leaf);
      }
    }
    for (auto& [number, part] : offloaded_) {
      ASSIGN_OR_RETURN(params, add(part, number));
      if (params != 1)
        return bad(printable(flat_name(
                       below(root_, std::string(kOffloaded), place(static_cast<size_t>(number))))) +
                   " has " + std::to_string(params) +
                   " parameters, where torchao's CPUOffloadOptimizer keeps one; choose one of the "
                   "optimizers with --optimizer NAME");
    }
    out_.offloaded = offloaded_.size();
    ASSIGN_OR_RETURN(small, add(on_device_, offloaded_.rbegin()->first + 1));
    out_.on_device = small;
    if (small > 0 && groups_.size() > 1)
      return bad(
          "its optimizer is torchao's CPUOffloadOptimizer with groups of several settings "
          "and parameters on the device, of which no file keeps the order; --optimizer NAME "
          "takes one, '" +
          printable(flat_name(below(root_, std::string(kOnDevice)))) + "' or another");
    finish();
    return std::move(out_);
  }

 private:
  /// Takes a leaf of a part, whose state dict begins at `depth` of its path.
  Status take(Part& part, size_t depth, const Leaf& leaf) {
    const auto from = leaf.path.begin() + static_cast<std::ptrdiff_t>(depth) + 1;
    const std::string key = leaf.path[depth].text();
    if (key == "param_groups") {
      const bool tensor = leaf.kind == Leaf::Kind::kTensor;
      ASSIGN_OR_RETURN(value, tensor ? number_of(leaf) : Result<Value>(with_numbers(leaf.value)));
      if (leaf.kind == Leaf::Kind::kSubclass || value.is_opaque() ||
          !part.groups.put(Path(from, leaf.path.end()), value, room_))
        return bad(printable(leaf.name()) +
                   ": is not a plain value, so what the optimizer is set to cannot be read");
    } else if (key == "state" && from != leaf.path.end() && from + 1 != leaf.path.end()) {
      part.state.emplace_back(Path(from, leaf.path.end()), &leaf);
    } else if (key != "state") {  // which is empty before the first step
      out_.rest.push_back(&leaf);
    }
    return fine();
  }

  /// Appends an optimizer whose parameters are numbered from `first`; returns how many it has.
  Result<size_t> add(Part& part, int64_t first) {
    size_t count = 0;
    for (Value& group : part.groups.take().items) {
      std::vector<Value> numbers;
      Value settings{.kind = Value::Kind::kDict};
      for (size_t i = 0; i + 1 < group.items.size(); i += 2) {
        const bool params = group.items[i].text == "params";
        if (params) numbers = group.items[i + 1].items;
        if (!params)
          settings.items.insert(settings.items.end(), {group.items[i], group.items[i + 1]});
      }
      if (groups_.empty() || !(groups_.back().first == settings))
        groups_.emplace_back(std::move(settings), Value::list({}));
      for (const Value& number : numbers) {
        if (!number.is(Value::Kind::kInt) || number.integer != static_cast<int64_t>(count))
          return bad("a group's params are not the numbers that torch gives them, 0, 1, ...");
        groups_.back().second.items.push_back(Value::number(first + number.integer));
        ++count;
      }
    }
    for (auto& [path, leaf] : part.state) {
      const int64_t number = number_of_key(path[0]);
      if (number < 0 || static_cast<size_t>(number) >= count)
        return bad(printable(leaf->name()) + ": is of no parameter by its number");
      path[0] = Key(Key::Kind::kNumber, first + number);
      Leaf& made = out_.document.leaves.emplace_back(*leaf);
      made.path = joined_path(below(root_, "state"), path);
    }
    return count;
  }

  void finish() {
    Value list = Value::list({});
    for (auto& [settings, params] : groups_) {
      settings.items.insert(settings.items.end(), {Value::words("params"), std::move(params)});
      list.items.push_back(std::move(settings));
    }
    Leaf& made = out_.document.leaves.emplace_back();
    made.kind = Leaf::Kind::kValue;
    made.path = below(root_, "param_groups");
    made.value = std::move(list);
    out_.document.manifest = document_.manifest;
  }

  const Document& document_;
  const Path& root_;
  OffloadView out_;
  std::map<int64_t, Part> offloaded_;
  Part on_device_;
  std::vector<std::pair<Value, Value>> groups_;  // settings, and the numbers of parameters
  int64_t room_ = kMaxParams;
};

}  // namespace

std::vector<OptimizerRoot> joined_offload(const Document& document,
                                          std::vector<OptimizerRoot> roots) {
  if (document.manifest == nullptr || !document.manifest->has_paths) return roots;
  const auto is_chosen = [&](const OptimizerRoot& root) {
    return document.optimizer && flat_name(root.path) == *document.optimizer;
  };
  if (std::ranges::any_of(roots, is_chosen)) return roots;
  std::vector<OptimizerRoot> out;
  std::set<std::string> around;  // their paths
  for (const OptimizerRoot& root : roots) {
    const auto path = around_offloaded(root.path);
    if (path && around.insert(id_of(*path, path->size())).second)
      out.push_back({*path, true, true, true});
  }
  for (OptimizerRoot& root : roots) {
    const size_t n = root.path.size();
    const bool on_device =
        n > 0 && root.path[n - 1].text() == kOnDevice && around.contains(id_of(root.path, n - 1));
    if (!around_offloaded(root.path) && !on_device) out.push_back(std::move(root));
  }
  return out;
}

Result<OffloadView> offload_view(const Document& document, const Path& root) {
  return Joining(document, root).run();
}

}  // namespace lowbit::ckpt
