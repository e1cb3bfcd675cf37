// Reductions over the whole tensor before the update: exact sums for rules, maxima for scales.
#include <cstring>
#include <vector>

#include "catalog/catalog.h"
#include "core/column_sums.h"
#include "core/exact_sum.h"
#include "cpu/step.h"
#include "cpu/tile.h"

namespace lowbit::cpu {
namespace {

/// Other threads may add to the same sum at the same time.
void add_shared(int64_t* bins, const int64_t* more) {
  for (int k = 0; k < ExactSum::kWords; ++k) {
    if (more[k] != 0) __atomic_fetch_add(bins + k, more[k], __ATOMIC_RELAXED);
  }
}

void raise(uint32_t* absmax, uint32_t bits) {
  uint32_t seen = __atomic_load_n(absmax, __ATOMIC_RELAXED);
  while (seen < bits && !__atomic_compare_exchange_n(absmax, &seen, bits, true, __ATOMIC_RELAXED,
                                                     __ATOMIC_RELAXED)) {
  }
}

/// Whether every row of the job has row and column sums of its own, which is so with more than two
/// dimensions. With two, rows share the column sums, and columns of tiles do not.
bool by_rows(const Job& job) {
  return rule_info(job.rule).factors > 0 && job.cols != job.inner_cols;
}

/// Writes the magnitudes of blocks, one after another, in the form of StateSlot::block_next. Tiles
/// have whole blocks, so no other part measures these.
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

/// The parts into which a job is split for measuring, each for one thread.
enum class Walk {
  kTiles,    // nothing is shared: tiles, in memory order
  kColumns,  // rows share columns: all rows of a tile's columns
  kRows,     // every row has columns of its own: rows
};

Walk walk_of(const Job& job, int round) {
  if (rule_info(job.rule).grid_factor[round] < 0) return Walk::kTiles;
  return by_rows(job) ? Walk::kRows : Walk::kColumns;
}

Walk walk_of_scales(const Job& job) {
  for (int k = 0; k < rule_info(job.rule).slots; ++k) {
    if (job.state[k].col_next != nullptr) return Walk::kColumns;
  }
  return Walk::kTiles;
}

int64_t parts_of(const Job& job, Walk walk) {
  if (job.rows == 0 || job.cols == 0) return 0;
  return walk == Walk::kTiles     ? job.tiles()
         : walk == Walk::kColumns ? job.tiles_per_row()
                                  : job.rows;
}

/// fn(row, tile) for all tiles of the parts, row by row, in memory order.
template <class Fn>
void for_tiles(const Job& job, Walk walk, int64_t begin, int64_t end, const Fn& fn) {
  const int64_t tiles = job.tiles_per_row();
  if (walk == Walk::kColumns) {
    for (int64_t row = 0; row < job.rows; ++row) {
      for (int64_t tile = begin; tile < end; ++tile) fn(row, tile);
    }
    return;
  }
  if (walk == Walk::kRows) begin *= tiles, end *= tiles;
  for (; begin < end; ++begin) fn(begin / tiles, begin % tiles);
}

}  // namespace

int64_t measure_parts(const Job& job, int round) { return parts_of(job, walk_of(job, round)); }
int64_t scale_parts(const Job& job) { return parts_of(job, walk_of_scales(job)); }

namespace {

/// Rows of a tile column whose grids wait for being added to the column sums together.
class WaitingRows {
 public:
  WaitingRows(const Kernels& kernel, int tile)
      : kernel_(kernel), stride_(tile), grids_(static_cast<size_t>(tile) * ColumnSums::kTogether) {}
  /// Where the next row's grid goes.
  float* next() { return &grids_[static_cast<size_t>(rows_ * stride_)]; }
  /// The grid at next() is written, and its values from `first` on are of the columns `words`.
  void add(int first, int count, int64_t* words, ColumnSums& sums) {
    if (rows_ > 0 && (words != words_ || count != count_)) {  // a flat shard's first or last row
      const float* const last = next();
      flush(sums);
      std::memcpy(next() + first, last + first, static_cast<size_t>(count) * sizeof(float));
    }
    first_ = first, count_ = count, words_ = words;
    if (++rows_ == ColumnSums::kTogether) flush(sums);
  }
  void flush(ColumnSums& sums) {
    if (rows_ > 0)
      kernel_.add_columns(grids_.data() + first_, stride_, rows_, count_, sums, words_);
    rows_ = 0;
  }

 private:
  const Kernels& kernel_;
  int stride_, rows_ = 0, first_ = 0, count_ = 0;
  int64_t* words_ = nullptr;
  std::vector<float> grids_;
};

}  // namespace

void measure(const Job& job, int round, int64_t begin, int64_t end, const Kernels& kernel) {
  const RuleInfo rule = rule_info(job.rule);
  const int grid_factor = rule.grid_factor[round];
  const Walk walk = walk_of(job, round);
  Tile tile(job, kernel);
  WaitingRows waiting(kernel, job.tile);
  float sums[kMaxTotals][kMaxTile];
  float* const totals[kMaxTotals] = {sums[0], sums[1]};
  int64_t all[kMaxTotals][ExactSum::kWords] = {};
  std::vector<ColumnSums> columns;  // one for each part
  std::vector<double> room;
  if (walk == Walk::kColumns) {
    columns.resize(static_cast<size_t>(end - begin));
    room.resize(columns.size() * 2 * static_cast<size_t>(job.tile));
    double* next = room.data();
    for (ColumnSums& c : columns) c.high = next, c.low = next + job.tile, next += 2 * job.tile;
  }
  int64_t terms = 0;  // since the last carry
  const auto carry = [&] {
    for (auto& words : all) exact_carry(words);
    terms = 0;
  };
  const auto measure_tile = [&](int64_t row, int64_t at) {
    if (!tile.load(row, at, rule.reads[round])) return;
    float* const grid = waiting.next();
    kernel.measure[job.rule](round, tile.g(), tile.p(), tile.s(), tile.f(), tile.n, job.coef, grid,
                             totals);
    for (int k = 0; k < rule.totals[round]; ++k) {
      if (tile.ragged()) tile.blank(totals[k]);
      kernel.add(totals[k], tile.n, all[k]);
    }
    terms += tile.n;
    if (terms > ExactSum::kRoom / 2) carry();
    if (grid_factor < 0) return;
    const Factor& factor = job.factor[grid_factor];
    tile.runs([&](int64_t r, int64_t batch, int64_t c, int first, int count) {
      int64_t bins[ExactSum::kWords] = {};
      kernel.add(grid + first, count, bins);
      exact_carry_few(bins);
      add_shared(factor.row_sums + r * ExactSum::kWords, bins);
      int64_t* cols = factor.col_sums + (batch * (job.inner_cols + 1) + c) * ExactSum::kWords;
      if (walk == Walk::kColumns) {
        waiting.add(first, count, cols, columns[static_cast<size_t>(at - begin)]);
        return;
      }
      for (int i = 0; i < count; ++i) exact_add(grid[first + i], cols + i * ExactSum::kWords);
    });
  };
  if (walk == Walk::kColumns) {
    constexpr int64_t kTogether = ColumnSums::kTogether;
    for (int64_t row = 0; row < job.rows; row += kTogether) {
      for (int64_t at = begin; at < end; ++at) {
        for (int64_t r = row; r < job.rows && r < row + kTogether; ++r) measure_tile(r, at);
        waiting.flush(columns[static_cast<size_t>(at - begin)]);
      }
    }
  } else {
    for_tiles(job, walk, begin, end, measure_tile);
  }
  for (ColumnSums& c : columns) flush_columns(c);
  carry();
  for (int k = 0; k < rule.totals[round]; ++k)
    add_shared(job.totals + (round * kMaxTotals + k) * ExactSum::kWords, all[k]);
}

void measure_scales(const Job& job, int64_t begin, int64_t end, const Kernels& kernel) {
  const int slots = rule_info(job.rule).slots;
  const bool everywhere = job.has_cross_tile_scales(slots);
  const Walk walk = walk_of_scales(job);
  Tile tile(job, kernel);
  // The column maxima of every slot, one after another; added to the shared ones at the end.
  const int64_t from = walk == Walk::kColumns ? begin * job.tile - job.lead() : 0;
  const int64_t width = walk == Walk::kColumns ? (end - begin) * job.tile : 0;
  std::vector<uint32_t> columns(static_cast<size_t>(slots * width));
  for_tiles(job, walk, begin, end, [&](int64_t row, int64_t at) {
    const int64_t cut = job.cut_row(row);
    if ((!everywhere && cut < 0) || !tile.load(row, at)) return;
    tile.update();
    for (int k = 0; k < slots; ++k) {
      const StateSlot& slot = job.state[k];
      const float* x = tile.s()[k];
      if (slot.kind == kBlock && cut >= 0)
        measure_blocks(x, tile.n, slot.block,
                       slot.block_next + 2 * (cut * job.blocks(slot.block) + tile.block_of(slot)));
      if (!is_cross_tile(slot.kind)) continue;
      uint32_t* const own = slot.col_next == nullptr
                                ? nullptr
                                : columns.data() + (k * width + tile.col - from + tile.begin);
      const uint32_t absmax = kernel.absmax(x + tile.begin, tile.end - tile.begin, own);
      if (slot.row_next != nullptr) raise(slot.row_next + row * slot.row_stride, absmax);
    }
  });
  for (int k = 0; k < slots; ++k) {
    if (job.state[k].col_next == nullptr) continue;
    const uint32_t* absmax = columns.data() + k * width;
    for (int64_t i = from < 0 ? -from : 0; i < width && from + i < job.cols; ++i)
      raise(job.state[k].col_next + from + i, absmax[i]);
  }
}

}  // namespace lowbit::cpu
