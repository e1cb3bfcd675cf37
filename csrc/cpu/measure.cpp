// What must be known of the whole tensor before the update: exact sums for rules, maxima for
// scales.
#include "catalog.h"
#include "core/exact_sum.h"
#include "cpu/step.h"
#include "cpu/tile.h"

namespace lowbit::cpu {
namespace {

/// Another part may add to the same sum at the same time.
void add_shared(int64_t* bins, const int64_t* more) {
  for (int k = 0; k < ExactSum::kWords; ++k) {
    if (more[k] != 0) __atomic_fetch_add(bins + k, more[k], __ATOMIC_RELAXED);
  }
}

void raise(uint32_t* most, uint32_t bits) {
  uint32_t seen = __atomic_load_n(most, __ATOMIC_RELAXED);
  while (seen < bits && !__atomic_compare_exchange_n(most, &seen, bits, true, __ATOMIC_RELAXED,
                                                     __ATOMIC_RELAXED)) {
  }
}

/// With more than two dimensions every row of the job has row and column sums of its own; with two,
/// rows share the column sums, and columns of tiles do not.
bool by_rows(const Job& job) {
  return rule_info(job.rule).factors > 0 && job.cols != job.inner_cols;
}

/// The magnitudes of blocks, one after another, as StateSlot::block_next has them. Tiles hold whole
/// blocks, so nobody else measures these.
void measure_blocks(const float* x, int n, int block, uint32_t* next) {
  for (int i = 0; i < n; i += block, next += 2) {
    const int count = n - i < block ? n - i : block;
    for (int j = 0; j < count; ++j) {
      const uint32_t b = magnitude_bits(x[i + j]), rest = b == 0 ? 0 : 0x7fffffffu - b;
      next[0] = b > next[0] ? b : next[0];
      next[1] = rest > next[1] ? rest : next[1];
    }
  }
}

template <class Fn>
void for_tiles(const Job& job, int64_t begin, int64_t end, const Fn& fn) {
  const int64_t tiles_per_row = job.tiles_per_row();
  for (int64_t part = begin; part < end; ++part) {
    if (by_rows(job)) {
      for (int64_t tile = 0; tile < tiles_per_row; ++tile) fn(part, tile);
    } else {
      for (int64_t row = 0; row < job.rows; ++row) fn(row, part);
    }
  }
}

}  // namespace

int64_t measure_parts(const Job& job) {
  if (job.rows == 0 || job.cols == 0) return 0;
  return by_rows(job) ? job.rows : job.tiles_per_row();
}

void measure(const Job& job, int round, int64_t begin, int64_t end, const Leaves& leaf) {
  const RuleInfo rule = rule_info(job.rule);
  const int grid_factor = rule.grid_factor[round];
  Tile tile(job, leaf);
  float grid[kMostTile], sums[kMaxTotals][kMostTile];
  float* const totals[kMaxTotals] = {sums[0], sums[1]};
  int64_t all[kMaxTotals][ExactSum::kWords] = {};
  for_tiles(job, begin, end, [&](int64_t row, int64_t at) {
    if (!tile.load(row, at)) return;
    leaf.measure[job.rule](round, tile.g(), tile.p(), tile.s(), tile.f(), tile.n, job.coef, grid,
                           totals);
    for (int k = 0; k < rule.totals[round]; ++k) {
      if (tile.ragged()) tile.blank(totals[k]);
      exact_add(totals[k], tile.n, all[k]);
      exact_carry(all[k]);
    }
    if (grid_factor < 0) return;
    const Factor& factor = job.factor[grid_factor];
    tile.runs([&](int64_t r, int64_t batch, int64_t c, int first, int count) {
      int64_t bins[ExactSum::kWords] = {};
      exact_add(grid + first, count, bins);
      exact_carry(bins);
      add_shared(factor.row_sums + r * ExactSum::kWords, bins);
      int64_t* cols = factor.col_sums + (batch * (job.inner_cols + 1) + c) * ExactSum::kWords;
      // Of the last row nothing may be here.
      const bool full = (row + 1) % (ExactSum::kRoom / 2) == 0 || row + 2 >= job.rows;
      for (int i = 0; i < count; ++i) {
        exact_add(grid[first + i], cols + i * ExactSum::kWords);
        if (full) exact_carry(cols + i * ExactSum::kWords);
      }
    });
  });
  for (int k = 0; k < rule.totals[round]; ++k)
    add_shared(job.totals + (round * kMaxTotals + k) * ExactSum::kWords, all[k]);
}

void measure_scales(const Job& job, int64_t begin, int64_t end, const Leaves& leaf) {
  const int slots = rule_info(job.rule).slots;
  const bool everywhere = job.measures_scales(slots);
  Tile tile(job, leaf);
  for_tiles(job, begin, end, [&](int64_t row, int64_t at) {
    const int64_t cut = job.cut_row(row);
    if ((!everywhere && cut < 0) || !tile.load(row, at)) return;
    tile.update();
    for (int k = 0; k < slots; ++k) {
      const StateSlot& slot = job.state[k];
      const float* x = tile.s()[k];
      if (slot.kind == kBlock && cut >= 0)
        measure_blocks(x, tile.n, slot.block,
                       slot.block_next + 2 * (cut * job.blocks(slot.block) + tile.block_of(slot)));
      if (!is_measured(slot.kind)) continue;
      uint32_t most = 0;
      for (int i = tile.begin; i < tile.end; ++i) {
        const uint32_t b = magnitude_bits(x[i]);
        most = b > most ? b : most;
        if (slot.col_next != nullptr) raise(slot.col_next + tile.col + i, b);
      }
      if (slot.row_next != nullptr) raise(slot.row_next + row * slot.row_stride, most);
    }
  });
}

}  // namespace lowbit::cpu
