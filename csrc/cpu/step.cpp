#include "cpu/step.h"

#include "cpu/tile.h"

namespace lowbit::cpu {

void step(const Job& job, int64_t begin, int64_t end, const Leaves& leaf) {
  Tile tile(job, leaf);
  const int64_t tiles_per_row = job.tiles_per_row();
  int64_t row = begin / tiles_per_row, at = begin - row * tiles_per_row;
  for (; begin < end; ++begin) {
    tile.load(row, at);
    tile.update();
    tile.store();
    if (++at == tiles_per_row) ++row, at = 0;
  }
}

}  // namespace lowbit::cpu
