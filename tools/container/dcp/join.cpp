// Metadata that ranks wrote each for itself, as one.
#include <algorithm>
#include <iterator>
#include <unordered_map>

#include "container/dcp/dcp.h"
#include "io/text.h"

namespace lowbit::ckpt {
namespace {

/// The numbers that names of `part` have in `all`.
std::vector<uint32_t> renumber(std::vector<std::string>& all,
                               const std::vector<std::string>& part) {
  std::vector<uint32_t> numbers;
  for (const std::string& name : part) {
    const auto known = std::ranges::find(all, name);
    numbers.push_back(static_cast<uint32_t>(known - all.begin()));
    if (known == all.end()) all.push_back(name);
  }
  return numbers;
}

/// Both lists are sorted by name; entries of one name are given to `both`.
template <class T, class Both>
Status merge(std::vector<T>& all, std::vector<T> part, const Both& both) {
  const bool same =
      std::ranges::equal(all, part, [](const T& a, const T& b) { return a.name == b.name; });
  if (same) {  // as a rule: nothing has to move
    for (size_t i = 0; i < all.size(); ++i) RETURN_IF_ERROR(both(all[i], part[i]));
    return fine();
  }
  std::vector<T> merged;
  merged.reserve(all.size() + part.size());
  size_t a = 0, b = 0;
  while (a < all.size() || b < part.size()) {
    if (b == part.size() || (a < all.size() && all[a].name < part[b].name)) {
      merged.push_back(std::move(all[a++]));
    } else if (a == all.size() || part[b].name < all[a].name) {
      merged.push_back(std::move(part[b++]));
    } else {
      RETURN_IF_ERROR(both(all[a], part[b++]));
      merged.push_back(std::move(all[a++]));
    }
  }
  all = std::move(merged);
  return fine();
}

}  // namespace

Status join(Manifest& all, Manifest part, const std::string& what) {
  const auto files = renumber(all.file_names, part.file_names),
             transforms = renumber(all.transforms, part.transforms);
  const auto move = [&](FileExtent& p) {
    p.file = files[p.file];
    if (p.transform != 0) p.transform = 1 + transforms[p.transform - 1];
  };
  const uint64_t place = all.tensors.size() + all.blobs.size();
  for (Tensor& t : part.tensors) {
    t.place += place;
    for (Chunk& c : t.chunks) move(c.extent);
  }
  for (Blob& b : part.blobs) {
    b.place += place;
    move(b.extent);
    for (FileExtent& extent : b.more) move(extent);
  }

  RETURN_IF_ERROR(
      merge(all.tensors, std::move(part.tensors), [&](Tensor& t, Tensor& other) -> Status {
        if (t.dtype != other.dtype || t.shape != other.shape)
          return bad(what + ": " + printable(t.name) +
                     " has another shape or dtype than on the ranks before");
        t.chunks.insert(t.chunks.end(), std::make_move_iterator(other.chunks.begin()),
                        std::make_move_iterator(other.chunks.end()));
        return fine();
      }));
  // A value that several ranks have: the first rank's. A tensor that is not read is all of theirs.
  RETURN_IF_ERROR(merge(all.blobs, std::move(part.blobs), [](Blob& one, Blob& other) {
    if (!one.dtype.empty()) {
      one.more.push_back(other.extent);
      one.more.insert(one.more.end(), other.more.begin(), other.more.end());
    }
    return fine();
  }));
  for (size_t t = 0, b = 0; t < all.tensors.size() && b < all.blobs.size();) {
    const int order = all.tensors[t].name.compare(all.blobs[b].name);
    if (order == 0)
      return bad(what + ": " + printable(all.blobs[b].name) +
                 " is a tensor on one rank and another value on the other");
    ++(order < 0 ? t : b);
  }
  all.has_paths = all.has_paths || part.has_paths;
  all.tells_keys = all.tells_keys && part.tells_keys;
  if (all.facts.empty()) all.facts = std::move(part.facts);
  return fine();
}

void join_done(Manifest& all) {
  for (Tensor& t : all.tensors) {
    // Ranks that hold the same box (a replica, or an empty one) each wrote it; the first counts.
    std::ranges::stable_sort(t.chunks, [](const Chunk& a, const Chunk& b) {
      return std::pair(a.offset, a.shape) < std::pair(b.offset, b.shape);
    });
    const auto same = [](const Chunk& a, const Chunk& b) {
      return a.offset == b.offset && a.shape == b.shape;
    };
    t.chunks.erase(std::unique(t.chunks.begin(), t.chunks.end(), same), t.chunks.end());
  }
}

}  // namespace lowbit::ckpt
