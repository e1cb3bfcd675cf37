#include "dialect/tree/nested_value.h"

#include <utility>

namespace lowbit::ckpt {

bool NestedValue::put(const Path& path, size_t depth, const Value& value, int64_t& room) {
  if (depth == path.size()) {
    *this = NestedValue();
    value_ = value;
    return true;
  }
  if (depth > Value::kMaxDepth) return false;
  const Key& key = path[depth];
  const bool listed = key.kind == Key::Kind::kIndex || key.kind == Key::Kind::kTupleIndex;
  NestedValue* below = listed ? item(key, room) : entry(key);
  return below != nullptr && below->put(path, depth + 1, value, room);
}

/// The item of a list or tuple, which becomes long enough; null where there is no room.
NestedValue* NestedValue::item(const Key& key, int64_t& room) {
  if (keys_ != nullptr || !value_.items.empty()) *this = NestedValue();
  value_ = Value{.kind = key.kind == Key::Kind::kIndex ? Value::Kind::kList : Value::Kind::kTuple};
  const auto size = static_cast<int64_t>(items_.size());
  if (key.number < 0 || key.number >= size + room) return nullptr;
  if (key.number >= size) {
    room -= key.number + 1 - size;
    items_.resize(static_cast<size_t>(key.number) + 1);
  }
  return &items_[static_cast<size_t>(key.number)];
}

/// The value of a dict's key, which is added where there is none.
NestedValue* NestedValue::entry(const Key& key) {
  if (keys_ == nullptr) {
    *this = NestedValue(Value::Kind::kDict);
    keys_ = std::make_unique<Keys>();
  }
  const std::string name = key.is_name() ? "'" + key.name : std::to_string(key.number);
  const auto [at, fresh] = keys_->place.try_emplace(name, items_.size());
  if (fresh) {
    keys_->in_order.push_back(key.is_name() ? Value::words(key.name) : Value::number(key.number));
    items_.emplace_back();
  }
  return &items_[at->second];
}

Value NestedValue::take() {
  Value out = std::move(value_);
  for (size_t i = 0; i < items_.size(); ++i) {
    if (keys_ != nullptr) out.items.push_back(std::move(keys_->in_order[i]));
    out.items.push_back(items_[i].take());
  }
  *this = NestedValue();
  return out;
}

}  // namespace lowbit::ckpt
