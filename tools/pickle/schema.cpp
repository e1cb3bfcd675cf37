#include "pickle/schema.h"

#include <algorithm>

namespace lowbit::ckpt {
namespace {

/// A name in torch's enums of memory formats or of what a plan of DCP writes.
bool is_member(std::string_view name) {
  constexpr std::string_view kNames[] = {"TORCH_CONTIGUOUS_FORMAT",
                                         "TORCH_CHANNELS_LAST",
                                         "TORCH_PRESERVE_FORMAT",
                                         "TENSOR",
                                         "SHARD",
                                         "BYTE_IO"};
  return std::ranges::find(kNames, name) != std::end(kNames);
}

bool fits(const Pickle& p, NodeId id, char letter) {
  switch (letter) {
    case 'i':
      return p.is(id, Kind::kInt);
    case 's':
      return p.is(id, Kind::kString);
    case 'b':
      return p.is(id, Kind::kBool);
    case 'n':
      return p.is(id, Kind::kTuple) &&
             std::ranges::all_of(p.items(id), [&](NodeId n) { return p.is(n, Kind::kInt); });
    case 'p':
      return p.is(id, Kind::kPersistent);
    case 'g':
      return p.is(id, Kind::kGlobal);
    case 'q':
      return fits(p, id, 'g') || fits(p, id, 'c');
    case 'o':
      return p.ordered(id) && p.items(id).empty();
    case 'z':
      return fits(p, id, 'n') || (p.is(id, Kind::kCall) && p.global(id)->name == "Size");
    case 'h':
      return p.is(id, Kind::kNone) || fits(p, id, 'o');
    case 'r':
      return p.is(id, Kind::kInt) || p.is(id, Kind::kFloat);
    case 'y':
      return p.is(id, Kind::kBytes) || p.is(id, Kind::kString) ||
             (p.is(id, Kind::kCall) && p.global(id)->name == "encode");
    case 'd':
      return p.is(id, Kind::kDict) && p.items(id).empty();
    case 't':
      return p.is(id, Kind::kCall) && p.global(id)->name.starts_with("_rebuild_");
    case 'm':
      return p.is(id, Kind::kGlobal) && (p.global(id)->name.ends_with("MEM_FORMAT_ENCODING") ||
                                         p.global(id)->name == "WriteItemType");
    case 'f':
      return p.is(id, Kind::kString) && is_member(p.text(id));
    case 'c':
      return p.is(id, Kind::kUnknown) || p.is(id, Kind::kOpaque);
    case 'u':
      return p.is(id, Kind::kTuple);
    case 'w':
      return p.is(id, Kind::kDict);
    case 'l':
      return p.is(id, Kind::kList);
    case 'x':
      return true;
    default:
      return false;
  }
}

}  // namespace

bool arguments_match(const Pickle& p, NodeId arguments, const char* pattern) {
  const auto given = p.items(arguments);
  size_t at = 0;
  bool optional = false;
  for (const char* c = pattern; *c != '\0'; ++c) {
    if (*c == '?') {
      optional = true;
    } else if (c[1] == '*') {
      while (at < given.size() && fits(p, given[at], *c)) ++at;
      ++c;
    } else if (at == given.size()) {
      return optional;
    } else if (!fits(p, given[at++], *c)) {
      return false;
    }
  }
  return at == given.size();
}

}  // namespace lowbit::ckpt
