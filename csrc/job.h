// What reception (ops_plan.cpp) hands to a processor: one Job for each parameter, checked, with every
// pointer local and contiguous.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/random.h"

namespace lowbit {

/// What a scale covers. From kRow on it covers more than a tile holds: its maxima are measured, and
/// reduced over the shards, before a code can be written.
enum ScaleKind : int { kNoScale, kBlock, kRow, kColumn, kTensor, kRank1, kScaleKinds };
LB_HD constexpr bool is_measured(int kind) { return kind >= kRow; }

/// Which rows hold blocks that are cut: a part of them lies elsewhere, so that their largest and
/// least magnitudes are measured, and reduced over the holders, too. The scales of cut rows are kept
/// for the whole row by every holder.
enum Cut : int { kNoCut, kCutEnds, kCutAll, kCuts };

struct StateSlot {
  void* values;  // codes, or the values themselves
  void* scales;  // of blocks; null otherwise
  // For each block of the cut rows, as bits: its largest magnitude, and 0x7fffffff less its least one
  // that is not zero (0: there is none), so that the largest of both over all holders count.
  uint32_t* block_next;
  // Measured scales, as bits of magnitudes: an element's scale is the least of its row's and its
  // column's maximum. Null where the kind has none.
  const uint32_t *row_most, *col_most;  // that the codes were written with
  uint32_t *row_next, *col_next;        // of the values to come
  int format;                           // index into StateFormats
  int block;                            // length of a block, 0 where there is none
  int kind;                             // a ScaleKind
  int row_stride;   // of row_most and row_next: 1, or 0 where all rows share one
  bool stochastic;  // how codes are rounded
};

/// A second moment kept as a mean for each row and each column of the last two dimensions.
struct Factor {
  float *row, *col;  // state: [batches, inner_rows], [batches, inner_cols]
  // Workspace: rows divided by their mean; sums (exact_sum.h) of the rows, and of the columns
  // [batches, inner_cols + 1], the last of a batch for the old rows.
  float* scaled;
  int64_t *row_sums, *col_sums;
};

struct Job {
  void* param;
  void* extra;  // what the parameter format keeps beside the parameter, or null
  const void* grad;
  StateSlot state[kMaxSlots];
  Factor factor[kMaxFactors];
  int64_t* totals;  // workspace: ExactSum bins [rounds, kMaxTotals]
  float* numbers;   // state: what the rule keeps for the tensor, or null
  int param_format, grad_format, rule;
  int tile;             // values in a tile: whole blocks of every slot
  int64_t rows, cols;   // the local part
  int64_t global_cols;  // of the whole parameter
  int64_t first;        // global flat index of the local element (0, 0)
  // A shard of a flattened parameter: the rows that it touches, of which the first `front` elements
  // and the last `back` ones are not here. State, and what is kept beside the parameter, has room
  // for them; parameter and gradient have not.
  int64_t front, back;
  int cut;        // a Cut
  int64_t numel;  // of the whole parameter
  // For factored moments, the last two dimensions: local lengths, those of the whole parameter, and
  // how many such matrices are here (one, if an empty one, where there are no other dimensions).
  int64_t batches, inner_rows, inner_cols, global_inner_rows, global_inner_cols;
  RandomKey random;
  bool write_param;  // false where lr is 0: the parameter is then not touched at all
  alignas(8) unsigned char coef[128];  // the rule's Coef

  /// Columns by which the first tile begins before the part: tiles begin where blocks do.
  LB_HD int64_t lead() const {
    return cut == kCutAll && global_cols > 0 ? first % global_cols % tile : 0;
  }
  LB_HD int64_t tiles_per_row() const { return ceil_div(lead() + cols, tile); }
  LB_HD int64_t tiles() const { return rows * tiles_per_row(); }
  /// Blocks of a row whose scales are here.
  LB_HD int64_t blocks(int block) const {
    return ceil_div(cut == kCutAll ? global_cols : cols, block);
  }
  /// The row's number among the cut ones, -1 where it is none.
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
  LB_HD bool measures_scales(int slots) const {
    for (int k = 0; k < slots; ++k) {
      if (is_measured(state[k].kind)) return true;
    }
    return false;
  }
  /// Rows that hold something whose maxima are measured, and the i-th of them.
  LB_HD int64_t measured_rows(int slots) const {
    return measures_scales(slots) ? rows : cut_rows();
  }
  LB_HD int64_t measured_row(int64_t i, int slots) const {
    if (measures_scales(slots) || cut == kCutAll) return i;
    return i == 0 && (front > 0 || rows == 1) ? 0 : rows - 1;
  }
};

/// A local part [rows, cols] of a gradient, contiguous, and the buffer that it is added to.
struct Accumulation {
  void* held;
  void* beside;  // what the buffer's format keeps beside it, or null
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

}  // namespace lowbit
