#include "cpu/step.h"

#include <algorithm>

#include "catalog.h"
#include "cpu/tile.h"

namespace lowbit::cpu {

void step(const Job& job, int64_t begin, int64_t end, const Leaves& leaf) {
  Tile tile(job, leaf);
  const int64_t tiles_per_row = job.tiles_per_row();
  int64_t row = begin / tiles_per_row, at = begin - row * tiles_per_row;
  for (; begin < end; ++begin) {
    if (tile.load(row, at)) {
      tile.update();
      tile.store();
    }
    if (++at == tiles_per_row) ++row, at = 0;
  }
}

void write_cut_scales(const Job& job, const Leaves& leaf) {
  if (job.cut_rows() == 0) return;
  const float zeros[kTile] = {};
  alignas(8) char codes[kTile * sizeof(float)];
  for (int k = 0; k < rule_info(job.rule).slots; ++k) {
    const StateSlot& slot = job.state[k];
    if (slot.kind != kBlock) continue;
    const int64_t blocks = job.blocks(slot.block), bytes = state_info(slot.format).scale_bytes;
    for (int64_t row = 0; row < job.rows; ++row) {
      const int64_t cut = job.cut_row(row);
      if (cut < 0) continue;
      for (int64_t b = 0; b < blocks; b += kTile) {  // as if blocks had one value each
        const int n = static_cast<int>(std::min<int64_t>(blocks - b, kTile));
        leaf.encode[slot.format](zeros, codes,
                                 static_cast<char*>(slot.scales) + (row * blocks + b) * bytes, 1, n,
                                 nullptr, slot.block_next + 2 * (cut * blocks + b));
      }
    }
  }
}

}  // namespace lowbit::cpu
