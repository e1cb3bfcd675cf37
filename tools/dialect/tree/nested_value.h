// A plain value assembled from leaves at nested paths.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "container/manifest/path.h"
#include "pickle/plain.h"

namespace lowbit::ckpt {

class NestedValue {
 public:
  NestedValue() = default;
  explicit NestedValue(Value::Kind kind) : value_{.kind = kind} {}

  /// Sets the value at a nested path, in the same time however many keys a dict has. Indices may
  /// come in any order, so a list grows to the largest; `room` is how many items may still be
  /// added. False where the path is not valid or `room` is too small.
  bool put(const Path& path, const Value& value, int64_t& room) {
    return put(path, 0, value, room);
  }
  /// The value. Nothing is left of it here.
  Value take();

 private:
  struct Keys {
    std::vector<Value> in_order;
    std::unordered_map<std::string, size_t> place;
  };

  bool put(const Path& path, size_t depth, const Value& value, int64_t& room);
  NestedValue* item(const Key& key, int64_t& room);
  NestedValue* entry(const Key& key);

  Value value_;                     // all of it, or its kind alone where it has items below
  std::vector<NestedValue> items_;  // of a list, or a dict's values
  std::unique_ptr<Keys> keys_;      // of a dict
};

}  // namespace lowbit::ckpt
