// Which keys of a directory's tree are numbers, and which are places in tuples.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "container/manifest/path.h"
#include "pickle/plain.h"

namespace lowbit::ckpt {

/// The paths of `.metadata` are as torch has them: text for every key, numbers for places in lists
/// alone. What they do not say lies beside them, under `kEntry`, which torch does not look at:
///
///   {"numbers": [(PATH, [NUMBER, ...]), ...], "tuples": [PATH, ...], "list": True}
///
/// PATH leads to a dict or tuple, in texts. "list" is there where the whole is a list: torch loads
/// a dict alone, so its places are text too. Directories of other programs have no such entry.
class KeyKinds {
 public:
  static constexpr std::string_view kEntry = "lowbit_keys";

  /// Notes the keys on the way to a leaf. An error where a dict has both a number and its text for
  /// keys: a directory would make one of the two.
  Status add(const Path& path);
  /// Whether there is nothing but text and places in lists.
  bool empty() const;
  Value value() const;

  static Result<KeyKinds> of(const Value& value, const std::string& what);
  /// Gives the keys of a leaf's path their kinds. No text changes.
  void restore(Path& path) const;

  /// Whether `.metadata` has a key as a number: the place in a list that is not the whole.
  static bool written_as_number(const Path& path, size_t at) {
    return at > 0 && path[at].kind == Key::Kind::kIndex;
  }

 private:
  struct Node {
    std::map<std::string, size_t> children;
    std::set<int64_t> numbers, texts;  // texts: those that read as a number
    bool tuple = false;
  };
  size_t child(size_t node, const std::string& key);
  std::vector<Node> nodes_{1};
  bool list_ = false;  // the whole
};

}  // namespace lowbit::ckpt
