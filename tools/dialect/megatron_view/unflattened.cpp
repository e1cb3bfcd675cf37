#include <algorithm>

#include "dialect/megatron_view/megatron.h"
#include "io/text.h"

namespace lowbit::ckpt {

Result<std::shared_ptr<Source>> unflattened(const Leaf& leaf, const Shape& shape) {
  const Error no =
      bad(printable(leaf.name()) + ": has the shape " + shape_text(leaf.shape) +
          ", which is none of its weight's, " + shape_text(shape) + ", flattened or not");
  if (leaf.shape.size() != shape.size() + 1 || leaf.source == nullptr) return no;
  Shape shard = shape;
  int64_t elements = 1;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (leaf.shape[d] <= 0 || shape[d] <= 0 || shape[d] % leaf.shape[d] != 0) return no;
    shard[d] = shape[d] / leaf.shape[d];
    elements *= shard[d];
  }
  if (elements != leaf.shape.back()) return no;
  const auto bytes = static_cast<uint64_t>(leaf.dtype->bytes);
  // Reads the rows of shards one after the other.
  return source_by([source = leaf.source, bytes, shape, shard](uint64_t first, uint64_t count,
                                                               void* out) -> Status {
    auto* to = static_cast<char*>(out);
    while (count > 0) {
      // The place of `first`, from the last dimension on, in the grid of shards and inside one.
      uint64_t rest = first, grid = 0, inside = 0, grid_step = 1, inside_step = 1, run = 1;
      bool whole = true;    // all dimensions so far are in one shard
      uint64_t before = 0;  // how much of the run is behind `first`
      for (size_t d = shape.size(); d-- > 0;) {
        const auto size = static_cast<uint64_t>(shape[d]), part = static_cast<uint64_t>(shard[d]);
        const uint64_t at = rest % size;
        rest /= size;
        grid += at / part * grid_step;
        inside += at % part * inside_step;
        if (whole) {
          before += at % part * run;
          run *= part;
        }
        whole = whole && part == size;
        grid_step *= size / part;
        inside_step *= part;
      }
      const uint64_t n = std::min(count, run - before);
      RETURN_IF_ERROR(source->read(grid * inside_step + inside, n, to));
      first += n;
      count -= n;
      to += n * bytes;
    }
    return fine();
  });
}

}  // namespace lowbit::ckpt
