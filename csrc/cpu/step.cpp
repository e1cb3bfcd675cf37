#include "cpu/step.h"

#include <algorithm>

#include "catalog/catalog.h"
#include "cpu/tile.h"

namespace lowbit::cpu {

namespace {

/// Whether the rows can be joined into one. A block at least as long as a row ends with the row.
bool can_join(const Job& job, const RuleInfo& rule) {
  if (job.rows < 2 || job.cols == 0 || job.global_cols != job.cols || rule.factors > 0 ||
      job.cut != kNoCut || job.front > 0 || job.back > 0)
    return false;
  for (int k = 0; k < rule.slots; ++k) {
    const StateSlot& slot = job.state[k];
    if (slot.kind == kNoScale) continue;
    if (slot.kind != kBlock || job.cols * state_info(slot.format).bits % 8 != 0 ||
        (job.cols > slot.block && job.cols % slot.block != 0))
      return false;
  }
  return true;
}

}  // namespace

void lengthen_tiles(Job& job) {
  const RuleInfo rule = rule_info(job.rule);
  const int64_t cols = job.cols;
  job.tile = std::max(job.tile, kLongTile);
  if (!can_join(job, rule)) return;
  int max_rows = job.tile;  // rows in a tile
  for (int k = 0; k < rule.slots; ++k) {
    StateSlot& slot = job.state[k];
    if (slot.kind != kBlock) continue;
    max_rows = kMaxBlocks;
    if (cols < slot.block) slot.block = static_cast<int>(cols);
  }
  if (cols < job.tile)
    job.tile = static_cast<int>(cols * std::min<int64_t>(job.tile / cols, max_rows));
  job.cols = job.global_cols = job.rows * cols;
  job.rows = 1;
}

void fetch_first_tile(const Job& job) {
  const int64_t here = job.rows * job.cols - job.front - job.back;
  const int64_t n = std::min<int64_t>(job.tile, here);
  prefetch(job.grad, n * grad_bytes(job.grad_format));
  prefetch(job.param, n * param_info(job.param_format).bytes);
  for (int k = 0; k < rule_info(job.rule).slots; ++k) {
    const StateSlot& slot = job.state[k];
    prefetch(slot.values, code_bytes(n, state_info(slot.format).bits));
    if (slot.kind == kBlock) prefetch(slot.scales, 1);
  }
}

void step(const Job& job, int64_t begin, int64_t end, const Kernels& kernel) {
  Tile tile(job, kernel);
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

void write_cut_scales(const Job& job, const Kernels& kernel) {
  if (job.cut_rows() == 0) return;
  const float zeros[kMaxBlocks] = {};
  BlockScales found;
  for (int k = 0; k < rule_info(job.rule).slots; ++k) {
    const StateSlot& slot = job.state[k];
    if (slot.kind != kBlock) continue;
    const int64_t blocks = job.blocks(slot.block), bytes = state_info(slot.format).scale_bytes;
    for (int64_t row = 0; row < job.rows; ++row) {
      const int64_t cut = job.cut_row(row);
      if (cut < 0) continue;
      for (int64_t b = 0; b < blocks; b += kMaxBlocks) {  // as if each block had one value
        const int n = static_cast<int>(std::min<int64_t>(blocks - b, kMaxBlocks));
        kernel.scale[slot.format](zeros, 1, n, slot.block_next + 2 * (cut * blocks + b), nullptr,
                                  static_cast<char*>(slot.scales) + (row * blocks + b) * bytes,
                                  found);
      }
    }
  }
}

}  // namespace lowbit::cpu
