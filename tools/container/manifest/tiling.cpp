#include "container/manifest/tiling.h"

#include <algorithm>
#include <span>

#include "io/text.h"

namespace lowbit::ckpt {
namespace {

using Boxes = std::span<const Chunk*>;

bool overlap(const Chunk& a, const Chunk& b) {
  for (size_t d = 0; d < a.shape.size(); ++d) {
    if (a.offset[d] >= b.offset[d] + b.shape[d] || b.offset[d] >= a.offset[d] + a.shape[d])
      return false;
  }
  return true;
}

Error overlapping(const Tensor& t, const Chunk& a, const Chunk& b) {
  return bad(printable(t.name) + ": its chunks at " + shape_text(a.offset) + " and " +
             shape_text(b.offset) + " overlap");
}

/// Meshes cut tensors into slabs, and slabs into slabs of the next dimension: sorted along `d`,
/// boxes either share their range or do not touch. That is checked in n log n. Anything else is
/// compared pair by pair, up to a limit.
Status check_disjoint(const Tensor& t, Boxes boxes, size_t d) {
  if (boxes.size() < 2) return fine();
  if (d == t.shape.size()) return overlapping(t, *boxes[0], *boxes[1]);
  std::ranges::sort(boxes, [d](const Chunk* a, const Chunk* b) {
    return std::pair(a->offset[d], a->shape[d]) < std::pair(b->offset[d], b->shape[d]);
  });
  bool slabs = true;
  for (size_t i = 1; i < boxes.size() && slabs; ++i) {
    const Chunk &a = *boxes[i - 1], &b = *boxes[i];
    slabs = (a.offset[d] == b.offset[d] && a.shape[d] == b.shape[d]) ||
            b.offset[d] >= a.offset[d] + a.shape[d];
  }
  if (slabs) {
    for (size_t begin = 0; begin < boxes.size();) {
      size_t end = begin + 1;
      while (end < boxes.size() && boxes[end]->offset[d] == boxes[begin]->offset[d]) ++end;
      RETURN_IF_ERROR(check_disjoint(t, boxes.subspan(begin, end - begin), d + 1));
      begin = end;
    }
    return fine();
  }
  constexpr size_t kMaxIrregular = 4096;
  if (boxes.size() > kMaxIrregular)
    return bad(printable(t.name) + ": " + std::to_string(boxes.size()) +
               " of its chunks overlap or lie in no grid");
  for (size_t i = 0; i < boxes.size(); ++i) {
    for (size_t k = i + 1; k < boxes.size(); ++k) {
      if (boxes[k]->offset[d] >= boxes[i]->offset[d] + boxes[i]->shape[d]) break;  // sorted
      if (overlap(*boxes[i], *boxes[k])) return overlapping(t, *boxes[i], *boxes[k]);
    }
  }
  return fine();
}

}  // namespace

Status check_tiling(const Tensor& t) {
  ASSIGN_OR_RETURN(total, elements(t.shape, printable(t.name)));
  std::vector<const Chunk*> boxes;
  for (const Chunk& c : t.chunks) {
    if (c.offset.size() != t.shape.size() || c.shape.size() != t.shape.size())
      return bad(printable(t.name) + ": a chunk has another number of dimensions than " +
                 shape_text(t.shape));
    for (size_t d = 0; d < t.shape.size(); ++d) {
      if (c.offset[d] > t.shape[d] || c.shape[d] > t.shape[d] - c.offset[d]) {
        return bad(printable(t.name) + ": the chunk " + shape_text(c.shape) + " at " +
                   shape_text(c.offset) + " reaches out of " + shape_text(t.shape));
      }
    }
    if (volume(c.shape) > 0) boxes.push_back(&c);
  }
  RETURN_IF_ERROR(check_disjoint(t, boxes, 0));
  // Disjoint and inside: they cover everything exactly where their volumes add up.
  uint64_t covered = 0;
  for (const Chunk* c : boxes) covered += volume(c->shape);
  if (covered != total) {
    return bad(printable(t.name) + ": its chunks have " + std::to_string(covered) + " of its " +
               std::to_string(total) + " elements; a part is missing");
  }
  return fine();
}

}  // namespace lowbit::ckpt
