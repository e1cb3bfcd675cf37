#include "pipeline/select.h"

#include <algorithm>

#include "io/partial_name.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// Length of the element of `p` that stands for one character, and whether `c` fits it. A '['
/// without its ']' is a plain character.
std::pair<size_t, bool> one(std::string_view p, char c) {
  if (p[0] == '\\' && p.size() > 1) return {2, p[1] == c};
  if (p[0] != '[') return {1, p[0] == '?' || p[0] == c};
  const bool inverted = p.size() > 1 && (p[1] == '!' || p[1] == '^');
  const size_t start = inverted ? 2 : 1;
  const size_t end = p.find(']', start + 1);  // a ']' that comes first is one of the set
  if (end == std::string_view::npos) return {1, c == '['};
  bool inside = false;
  for (size_t i = start; i < end; ++i) {
    const auto low = static_cast<unsigned char>(p[i]), at = static_cast<unsigned char>(c);
    if (i + 2 < end && p[i + 1] == '-') {
      inside = inside || (low <= at && at <= static_cast<unsigned char>(p[i + 2]));
      i += 2;
    } else {
      inside = inside || low == at;
    }
  }
  return {end + 1, inside != inverted};
}

bool any_matches(const std::vector<std::string>& patterns, std::string_view name) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [name](const std::string& p) { return glob_matches(p, name); });
}

}  // namespace

bool glob_matches(std::string_view pattern, std::string_view name) {
  size_t p = 0, n = 0, star = std::string_view::npos, from = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      from = n;
      continue;
    }
    if (p < pattern.size()) {
      const auto [length, fits] = one(pattern.substr(p), name[n]);
      if (fits) {
        p += length;
        ++n;
        continue;
      }
    }
    if (star == std::string_view::npos) return false;
    // The last star takes one character more; stars before it need not be tried again.
    p = star + 1;
    n = ++from;
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

bool selected(const Selection& selection, std::string_view name) {
  return (selection.include.empty() || any_matches(selection.include, name)) &&
         !any_matches(selection.exclude, name);
}

bool selected(const Selection& selection, const std::vector<std::string>& names) {
  const auto any = [&](const std::vector<std::string>& patterns) {
    return std::any_of(names.begin(), names.end(),
                       [&](const std::string& name) { return any_matches(patterns, name); });
  };
  return (selection.include.empty() || any(selection.include)) && !any(selection.exclude);
}

std::vector<std::string> names_of(const std::string& name, const State& state) {
  std::vector<std::string> names = {name};
  for (const Leaf* leaf : state.leaves) names.push_back(leaf->name());
  return names;
}

Document select(Document document, const Selection& selection) {
  if (selection.include.empty() && selection.exclude.empty()) return document;
  std::erase_if(document.leaves,
                [&](const Leaf& leaf) { return !selected(selection, leaf.name()); });
  return document;
}

std::vector<std::string> warn_of_leftovers(const std::string& target) {
  std::vector<std::string> warnings;
  for (const std::string& left : leftovers_of(target))
    warnings.push_back(printable(left) +
                       " was left by a run that was killed; delete it, unless another run is "
                       "writing it now");
  return warnings;
}

std::vector<std::string> leave_out_opaque(Document& document) {
  constexpr size_t kShown = 5;
  std::vector<std::string> warnings;
  std::vector<Leaf> kept;
  size_t left_out = 0;
  for (Leaf& leaf : document.leaves) {
    if (leaf.kind == Leaf::Kind::kOpaque && leaf.value.is_opaque()) {
      if (left_out++ < kShown)
        warnings.push_back(printable(leaf.name()) + ": is opaque (" + opaque_names(leaf.value) +
                           ") and is left out");
      const bool listed = std::any_of(leaf.path.begin(), leaf.path.end(), [](const Key& key) {
        return key.kind == Key::Kind::kIndex || key.kind == Key::Kind::kTupleIndex;
      });
      if (!listed) continue;
      leaf.kind = Leaf::Kind::kValue;
      leaf.value = Value::none();
    }
    kept.push_back(std::move(leaf));
  }
  if (left_out > kShown)
    warnings.push_back(std::to_string(left_out - kShown) +
                       " more opaque values are left out; inspect names them");
  document.leaves = std::move(kept);
  return warnings;
}

Status check_selection(const Document& document, const Selection& selection) {
  if (selection.include.empty()) return fine();
  std::vector<std::string> names;
  for (const Leaf& leaf : document.leaves) names.push_back(leaf.name());
  return check_selection(names, selection);
}

Status check_selection(const std::vector<std::string>& names, const Selection& selection) {
  for (const std::string& pattern : selection.include) {
    const bool found = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
      return glob_matches(pattern, name);
    });
    if (!found)
      return Error{Exit::kUsage, "--include '" + printable(pattern) +
                                     "' fits nothing in the checkpoint; inspect lists its names"};
  }
  return fine();
}

}  // namespace lowbit::ckpt
