// The path to a leaf of a checkpoint's tree.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace lowbit::ckpt {

/// One step of a path: the key of a dict, text or a number, or the index in a list or tuple.
/// torch's directories store number keys as text ("state", "0"), so only the dialect can tell them
/// apart.
struct Key {
  enum class Kind : uint8_t { kName, kNumber, kIndex, kTupleIndex };
  Kind kind = Kind::kName;
  std::string name = {};
  int64_t number = 0;

  Key(std::string text) : name(std::move(text)) {}
  Key(const char* text) : name(text) {}
  Key(Kind k, int64_t n) : kind(k), number(n) {}
  bool is_name() const { return kind == Kind::kName; }
  /// The key as it appears in torch's flat names.
  std::string text() const { return is_name() ? name : std::to_string(number); }
  bool operator==(const Key&) const = default;
};

using Path = std::vector<Key>;

/// The place in a list.
inline Key place(size_t i) { return {Key::Kind::kIndex, static_cast<int64_t>(i)}; }
/// The path with more keys.
template <class... Keys>
Path below(Path path, Keys&&... keys) {
  (path.emplace_back(std::forward<Keys>(keys)), ...);
  return path;
}
inline Path joined_path(Path path, const Path& rest) {
  path.insert(path.end(), rest.begin(), rest.end());
  return path;
}
/// Whether a path is `root` or lies below it.
inline bool is_below(const Path& path, const Path& root) {
  return path.size() >= root.size() && std::equal(root.begin(), root.end(), path.begin());
}

/// torch's flat name: the keys, joined by '.'.
inline std::string flat_name(const Path& path) {
  std::string s;
  s.reserve(64);
  for (size_t i = 0; i < path.size(); ++i) {
    if (i > 0) s += '.';
    if (path[i].is_name()) {
      s += path[i].name;
    } else {
      s += std::to_string(path[i].number);
    }
  }
  return s;
}

}  // namespace lowbit::ckpt
