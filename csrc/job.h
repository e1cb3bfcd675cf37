// What reception (ops.cpp) hands to a processor: one Job for each parameter, checked, with every
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

struct StateSlot {
  void* values;  // codes, or the values themselves
  void* scales;  // of blocks; null otherwise
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
  int64_t numel;        // of the whole parameter
  // For factored moments, the last two dimensions: local lengths, those of the whole parameter, and
  // how many such matrices are here (one, if an empty one, where there are no other dimensions).
  int64_t batches, inner_rows, inner_cols, global_inner_rows, global_inner_cols;
  RandomKey random;
  bool write_param;  // false where lr is 0: the parameter is then not touched at all
  alignas(8) unsigned char coef[128];  // the rule's Coef

  int64_t tiles_per_row() const { return ceil_div(cols, tile); }
  int64_t tiles() const { return rows * tiles_per_row(); }
  LB_HD bool measures_scales(int slots) const {
    for (int k = 0; k < slots; ++k) {
      if (is_measured(state[k].kind)) return true;
    }
    return false;
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
