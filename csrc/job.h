// What reception (ops.cpp) hands to a processor: one Job for each parameter, checked, with every
// pointer local and contiguous.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/random.h"

namespace lowbit {

struct StateSlot {
  void* values;   // codes, or the values themselves
  float* scales;  // null where the format has none
  int format;     // index into StateFormats
  int block;      // 0 where the format has no scale
};

struct Job {
  void* param;
  const void* grad;
  StateSlot state[kMaxSlots];
  int param_format, grad_format, rule;
  int64_t rows, cols;   // the local part
  int64_t global_cols;  // of the whole parameter
  int64_t first;        // global flat index of the local element (0, 0)
  RandomKey random;
  bool write_param;  // false where lr is 0: the parameter is then not touched at all
  alignas(8) unsigned char coef[64];  // the rule's Coef

  int64_t tiles_per_row() const { return ceil_div(cols, kTile); }
  int64_t tiles() const { return rows * tiles_per_row(); }
};

}  // namespace lowbit
