// What the passes of a matrix in a subspace are told on a GPU: one row of int64 numbers. Python
// reads the order of the columns from the catalog.
#pragma once

namespace lowbit {

struct LowRankPlan {
  enum Column {
    kRows,
    kCols,
    kRank,
    kTall,
    kFira,
    kDraws,
    kByTensor,
    kLimits,
    kMaximize,
    kFirst,
    kFirstOfP,
    kGap,
    kSeed,
    kStream,
    kParamFormat,
    kExponent,
    kColumns
  };
  static constexpr const char* kNames[] = {
      "rows",     "cols",  "rank",       "tall", "fira", "draws",  "by_tensor",    "limits",
      "maximize", "first", "first_of_p", "gap",  "seed", "stream", "param_format", "exponent",
  };
  static_assert(sizeof kNames / sizeof *kNames == kColumns);
};

}  // namespace lowbit
