#include "container/dcp/key_kinds.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// The number whose text is `text`, as Python writes it.
std::optional<int64_t> number_of(const std::string& text) {
  int64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || at != end || std::to_string(number) != text) return std::nullopt;
  return number;
}

bool is_path(const Value& value) {
  return value.is(Value::Kind::kTuple) && std::ranges::all_of(value.items, [](const Value& key) {
           return key.is(Value::Kind::kText);
         });
}

}  // namespace

size_t KeyKinds::child(size_t node, const std::string& key) {
  const auto [known, is_new] = nodes_[node].children.try_emplace(key, nodes_.size());
  const size_t number = known->second;
  if (is_new) nodes_.emplace_back();
  return number;
}

Status KeyKinds::add(const Path& path) {
  const auto text_of = [](const Key& key) {
    return key.is_name() ? number_of(key.name) : std::nullopt;
  };
  const auto is_kept = [&](const Key& key) {
    return key.kind == Key::Kind::kNumber || key.kind == Key::Kind::kTupleIndex || text_of(key);
  };
  list_ = list_ || (!path.empty() && path[0].kind == Key::Kind::kIndex);
  const auto last = std::find_if(path.rbegin(), path.rend(), is_kept);
  size_t at = 0;
  for (auto key = path.begin(); key != last.base(); ++key) {
    Node& node = nodes_[at];
    const auto text = text_of(*key);
    const bool number = key->kind == Key::Kind::kNumber;
    if (text) node.texts.insert(*text);
    if (number) node.numbers.insert(key->number);
    if (key->kind == Key::Kind::kTupleIndex) node.tuple = true;
    if ((text && node.numbers.contains(*text)) || (number && node.texts.contains(key->number))) {
      const std::string where = flat_name(Path(path.begin(), key));
      return bad((where.empty() ? "the checkpoint" : printable(where)) + ": has the keys " +
                 key->text() + " and '" + key->text() + "', which a directory cannot tell apart");
    }
    at = child(at, key->text());
  }
  return fine();
}

bool KeyKinds::empty() const {
  return !list_ && std::ranges::all_of(nodes_, [](const Node& node) {
    return node.numbers.empty() && !node.tuple;
  });
}

Value KeyKinds::value() const {
  Value numbers = Value::list({}), tuples = Value::list({});
  // Depth first: a node's children have higher numbers, but its place in the order is by key.
  std::vector<std::pair<size_t, Value>> open = {{0, Value::tuple({})}};
  while (!open.empty()) {
    auto [at, path] = std::move(open.back());
    open.pop_back();
    const Node& node = nodes_[at];
    if (!node.numbers.empty()) {
      Value all = Value::list({});
      for (const int64_t n : node.numbers) all.items.push_back(Value::number(n));
      numbers.items.push_back(Value::tuple({path, std::move(all)}));
    }
    if (node.tuple) tuples.items.push_back(path);
    for (auto c = node.children.rbegin(); c != node.children.rend(); ++c) {
      Value below = path;
      below.items.push_back(Value::words(c->first));
      open.emplace_back(c->second, std::move(below));
    }
  }
  Value out{.kind = Value::Kind::kDict};
  out.set("numbers", std::move(numbers));
  out.set("tuples", std::move(tuples));
  if (list_) out.set("list", Value::boolean(true));
  return out;
}

Result<KeyKinds> KeyKinds::of(const Value& value, const std::string& what) {
  const Value *numbers = value.find("numbers"), *tuples = value.find("tuples");
  const auto no = [&] {
    return bad(what + ": its " + std::string(kEntry) + " is not laid out as lowbit-ckpt does");
  };
  if (numbers == nullptr || tuples == nullptr || !numbers->is(Value::Kind::kList) ||
      !tuples->is(Value::Kind::kList))
    return no();
  KeyKinds out;
  const auto node_at = [&out](const Value& path) {
    size_t node = 0;
    for (const Value& key : path.items) node = out.child(node, key.text);
    return node;
  };
  const Value* list = value.find("list");
  if (list != nullptr && !list->is(Value::Kind::kBool)) return no();
  out.list_ = list != nullptr && list->integer != 0;
  for (const Value& row : numbers->items) {
    if (!row.is(Value::Kind::kTuple) || row.items.size() != 2 || !is_path(row.items[0]) ||
        !row.items[1].is(Value::Kind::kList))
      return no();
    const size_t node = node_at(row.items[0]);
    for (const Value& number : row.items[1].items) {
      if (!number.is(Value::Kind::kInt)) return no();
      out.nodes_[node].numbers.insert(number.integer);
    }
  }
  for (const Value& path : tuples->items) {
    if (!is_path(path)) return no();
    out.nodes_[node_at(path)].tuple = true;
  }
  return out;
}

void KeyKinds::restore(Path& path) const {
  size_t at = 0;
  for (Key& key : path) {
    const Node& node = nodes_[at];
    const std::string text = key.text();
    if (const auto number = key.is_name() ? number_of(text) : std::nullopt) {
      if (list_ && &key == path.data() && *number >= 0) {
        key = Key(Key::Kind::kIndex, *number);
      } else if (node.tuple && *number >= 0) {
        key = Key(Key::Kind::kTupleIndex, *number);
      } else if (node.numbers.contains(*number)) {
        key = Key(Key::Kind::kNumber, *number);
      }
    }
    const auto below = node.children.find(text);
    if (below == node.children.end()) return;
    at = below->second;
  }
}

}  // namespace lowbit::ckpt
