// The input of a processor: one Job per parameter. The operators (csrc/ops) fill and check it, and
// every pointer in it is local and contiguous.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/random.h"

namespace lowbit {

/// What a scale covers. From kRow on it covers more than one tile. Its maxima are then measured,
/// and reduced over the shards, before any code is written.
enum ScaleKind : int { kNoScale, kBlock, kRow, kColumn, kTensor, kRank1, kScaleKinds };
LB_HD constexpr bool is_cross_tile(int kind) { return kind >= kRow; }

/// Which rows have cut blocks, that is, blocks with a part on another rank. Their largest and
/// smallest magnitudes are measured and reduced over the ranks. Every rank keeps the scales of a
/// cut row for the whole row.
enum Cut : int { kNoCut, kCutEnds, kCutAll, kCuts };

struct StateSlot {
  void* values;  // codes, or the values themselves
  void* scales;  // of the blocks, or null
  // For each block of the cut rows, as bits: its largest magnitude, and 0x7fffffff minus its
  // smallest nonzero magnitude (0 if all are zero). A maximum over the ranks reduces both.
  uint32_t* block_next;
  // Cross-tile scales, as bits of magnitudes. The scale of an element is the smaller of its row's
  // and its column's maximum. A pointer that the kind does not need is null.
  const uint32_t *row_absmax, *col_absmax;  // used by the stored codes
  uint32_t *row_next, *col_next;            // of the new values
  int format;                               // index into StateFormats
  int block;                                // block length, or 0 without blocks
  int kind;                                 // a ScaleKind
  int row_stride;   // of row_absmax and row_next: 1, or 0 if all rows share one scale
  bool stochastic;  // whether codes are rounded stochastically
};

/// A second moment stored as a mean for each row and each column of the last two dimensions.
struct Factor {
  float *row, *col;  // state: [batches, inner_rows], [batches, inner_cols]
  // Workspace: the rows divided by their mean, and sums (exact_sum.h) of the rows and of the
  // columns [batches, inner_cols + 1]. The last column sum of a batch is that of the old rows.
  float* scaled;
  int64_t *row_sums, *col_sums;
};

struct Job {
  void* param;
  void* compensation;  // the parameter format's compensation or correction bits, or null
  const void* grad;
  StateSlot state[kMaxSlots];
  Factor factor[kMaxFactors];
  int64_t* totals;  // workspace: exact sums [rounds, kMaxTotals]
  float* numbers;   // state: the rule's numbers for the tensor, or null
  int param_format, grad_format, rule;
  int tile;             // number of values in a tile: whole blocks of every slot
  int64_t rows, cols;   // of the local part
  int64_t global_cols;  // of the whole parameter
  int64_t first;        // global flat index of the local element (0, 0)
  // For a shard of a flattened parameter: `rows` are the rows it touches, without the first `front`
  // and the last `back` elements. State and compensation have room for these elements; parameter
  // and gradient do not.
  int64_t front, back;
  int cut;        // a Cut
  int64_t numel;  // of the whole parameter
  // For factored moments, the last two dimensions: local lengths, then lengths in the whole
  // parameter. `batches` is the number of such matrices here; without other dimensions it is one,
  // possibly empty.
  int64_t batches, inner_rows, inner_cols, global_inner_rows, global_inner_cols;
  RandomKey random;
  bool write_param;                    // false if lr is 0: the parameter is then left untouched
  alignas(8) unsigned char coef[128];  // the rule's Coef

  /// Whether the whole parameter is a single matrix. It may be cut along both dimensions, so the
  /// sum over it is one of the totals. One local matrix of several does not count: totals are added
  /// over all shards, and other shards have other matrices.
  LB_HD bool one_matrix() const {
    return batches == 1 && numel == global_inner_rows * global_inner_cols;
  }
  /// The number of columns by which the first tile begins before the local part. Tiles begin where
  /// blocks do.
  LB_HD int64_t lead() const {
    return cut == kCutAll && global_cols > 0 ? first % global_cols % tile : 0;
  }
  LB_HD int64_t tiles_per_row() const { return ceil_div(lead() + cols, tile); }
  LB_HD int64_t tiles() const { return rows * tiles_per_row(); }
  /// The number of blocks of a row whose scales are stored here.
  LB_HD int64_t blocks(int block) const {
    return ceil_div(cut == kCutAll ? global_cols : cols, block);
  }
  /// The index of the row among the cut rows, or -1.
  LB_HD int64_t cut_row(int64_t row) const {
    if (cut == kCutAll) return row;
    if (cut == kNoCut) return -1;
    const bool first_cut = front > 0 || (rows == 1 && back > 0);
    if (row == 0 && first_cut) return 0;
    return row == rows - 1 && back > 0 ? first_cut : -1;
  }
  LB_HD int64_t cut_rows() const {
    if (cut != kCutEnds || rows == 0) return cut == kCutAll ? rows : 0;
    return rows == 1 ? (front > 0 || back > 0) : (front > 0) + (back > 0);
  }
  LB_HD bool has_cross_tile_scales(int slots) const {
    for (int k = 0; k < slots; ++k) {
      if (is_cross_tile(state[k].kind)) return true;
    }
    return false;
  }
  /// The number of rows with measured maxima, and the i-th of them.
  LB_HD int64_t measured_rows(int slots) const {
    return has_cross_tile_scales(slots) ? rows : cut_rows();
  }
  LB_HD int64_t measured_row(int64_t i, int slots) const {
    if (has_cross_tile_scales(slots) || cut == kCutAll) return i;
    return i == 0 && (front > 0 || rows == 1) ? 0 : rows - 1;
  }
};

/// A contiguous local part [rows, cols] of a gradient, and the buffer that accumulates it.
struct Accumulation {
  void* held;
  void* compensation;  // the buffer format's compensation, or null
  const void* grad;
  int format, grad_format;  // indices into ParamFormats and GradFormats
  int64_t rows, cols;
  int64_t global_cols;  // of the whole gradient
  int64_t first;        // global flat index of the local element (0, 0)
  float scale;
  RandomKey random;

  int64_t tiles_per_row() const { return ceil_div(cols, kTile); }
  int64_t tiles() const { return rows * tiles_per_row(); }
};

/// A sum of gradients whose bits do not depend on their order (core/mean_bins.h). It begins with
/// `words` and takes `rows` addends of each element; then it is written to `words`, or its mean is.
struct MeanSum {
  uint64_t* words;      // [n]; null: the sum begins empty and is not kept
  const void* addends;  // [rows][n], rows `stride` elements apart
  void* mean;           // [n]; null: the words are written
  int addend_format;    // an index into GradFormats, or kWords: the words of other sums
  int mean_format;      // an index into GradFormats
  int width;
  int64_t rows, stride, n, divisor;

  static constexpr int kWords = -1;
};

}  // namespace lowbit
