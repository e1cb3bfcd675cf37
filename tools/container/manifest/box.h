// Boxes of a tensor, and a walk through one in pieces of bounded size.
#pragma once

#include <algorithm>

#include "container/manifest/dtype.h"
#include "io/status.h"

namespace lowbit::ckpt {

/// A box of a tensor: its first corner, and its size along each dimension.
struct Box {
  Shape offset, shape;
};

/// Calls `use` with boxes of at most `limit` elements that cover `box` in row-major order: whole
/// rows if they are small enough, else parts of a row.
template <class Use>
Status for_pieces(const Box& box, uint64_t limit, const Use& use) {
  const uint64_t total = volume(box.shape);
  if (total == 0) return fine();
  if (total <= limit) return use(box);
  size_t d = 0;
  while (box.shape[d] == 1) ++d;
  const uint64_t row = total / static_cast<uint64_t>(box.shape[d]);
  const auto at_once = static_cast<int64_t>(std::max<uint64_t>(1, limit / row));
  Box piece = box;
  for (int64_t at = 0; at < box.shape[d]; at += at_once) {
    piece.offset[d] = box.offset[d] + at;
    piece.shape[d] = std::min(at_once, box.shape[d] - at);
    RETURN_IF_ERROR(for_pieces(piece, limit, use));
  }
  return fine();
}

}  // namespace lowbit::ckpt
